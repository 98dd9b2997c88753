"""Trainings with checkpoints, one after the other on the same ranks, and what each of them reported."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_lab.config import UserError
from tests.ranks import Memo, config

STEPS = 2  # in an epoch
SMALL = ("data.num_train=64", "model=mlp", "model.image_size=8", "model.hidden_dim=32", "model.num_layers=2")
SYNC = "checkpoint.mode=sync"
ASYNC = "checkpoint.mode=async"


@dataclass
class Job:
    """One training, of three epochs if `words` say nothing else.

    Attributes:
        copied: what its folder is copied from before; "": nothing.
        harm: what is then done to that folder.
        trial: its model and data.
    """

    folder: str
    words: Sequence[str]
    copied: str = ""
    harm: Callable[[Path], object] | None = None
    trial: Sequence[str] = SMALL


@dataclass
class Reported:
    """What one training reported: losses of its steps, metrics of its epochs, facts, and the error that ended it."""

    losses: list[float]
    epochs: list[dict[str, float]]
    facts: dict[str, Any]
    error: str


def train_in(jobs: list[Job]) -> list[Reported]:
    """Do each job in turn, on this rank."""
    import torch.distributed as dist

    from fsdp_lab.training.train import train

    results = []
    for job in jobs:
        folder = Path(job.folder)
        if dist.get_rank() == 0 and job.copied:
            shutil.copytree(job.copied, folder)
            if job.harm:
                job.harm(folder)
        dist.barrier()
        losses, memo, error = list[float](), Memo(), ""
        try:
            train(config("training.epochs=3", *job.trial, *job.words), folder, memo, losses.extend)
        except UserError as raised:
            error = f"{type(raised).__name__}: {raised}"
        results.append(Reported(losses, memo.reported, memo.known, error))
    return results


def cut(file: Path) -> None:
    """Keep the first half of a file."""
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def names(*steps: int) -> list[str]:
    """The names of the checkpoints of these steps."""
    return [f"step_{step:08d}" for step in steps]


def names_in(folder: Path) -> list[str]:
    """The checkpoints in a folder that holds nothing else: of each a marker, and the data that it names."""
    markers = sorted(folder.glob("*.json"))
    data = [json.loads(marker.read_text())["data"] for marker in markers]
    assert sorted(f.name for f in folder.iterdir()) == sorted([*data, *(marker.name for marker in markers)])
    return [marker.stem for marker in markers]
