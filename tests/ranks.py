"""Run a function on gloo ranks of their own processes, and collect what each returns."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

from fsdp_lab.config import NightlyConfig
from fsdp_lab.training.__main__ import read_config

# What ranks import while they train, and pytest, which the files with the tests import.
_IMPORTED = [
    "fsdp_lab.training", "fsdp_lab.training.__main__", "fsdp_lab.workloads.vision.vit",
    "fsdp_lab.workloads.vision.mlp", "fsdp_lab.workloads.vision.digits", "fsdp_lab.workloads.vision.classification",
    "fsdp_lab.cpu_contention", "torchvision.models", "torch.utils.serialization", "yaml", "pytest", "tests.ranks",
]  # fmt: skip


def forkserver() -> multiprocessing.context.BaseContext:
    """Processes that are forked from one that has imported PyTorch, once: that takes longer than most of what they
    do."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    return context


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call `function(*args)` on `world_size` ranks, with torchrun's ranks in the environment; results in rank order."""
    forkserver()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, (world_size, folder, function, args), nprocs=world_size, start_method="forkserver")
        return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(world_size)]


def _rank(rank: int, world_size: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",  # not a port: another process may take one that was free a moment ago
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),  # a rank that fails must not hang the others
    )
    result = function(*args)
    Path(folder, str(rank)).write_bytes(pickle.dumps(result))
    while not all(Path(folder, str(other)).exists() for other in range(world_size)):
        time.sleep(0.01)  # nobody hangs up while another still talks; PyTorch ends this wait when one fails
    os._exit(0)  # torch's threads outlive the interpreter now and then, and abort a process that is done


class Memo:
    """A reporter that remembers."""

    def __init__(self) -> None:
        self.reported: list[dict[str, float]] = []
        self.known: dict[str, Any] = {}
        self.phases: list[str] = []

    def facts(self, facts: dict[str, Any]) -> None:
        self.known = facts

    def phase(self, name: str) -> None:
        self.phases.append(name)

    def step(self, step: int) -> None:
        pass

    def epoch(self, metrics: dict[str, float], checkpoint: Path | None) -> None:
        self.reported.append(dict(metrics))


SMALL = ("data.num_train=128", "data.num_val=30", "training.global_batch_size=32", "training.epochs=1",
         "checkpoint.mode=off", "export=false", "memory_profile=off")  # fmt: skip


def config(*overrides: str) -> NightlyConfig:
    """A small trial: four steps of 32 digits in its epoch."""
    return read_config(None, [*SMALL, *overrides])


def train_all(cases: list[list[str]], folder: str = "") -> list[tuple[list[float], list[dict[str, float]]]]:
    """Train each case; `(loss of every step, metrics of every epoch)` for each."""
    from fsdp_lab.training import train

    results = []
    for overrides in cases:
        losses: list[float] = []
        memo = Memo()
        with tempfile.TemporaryDirectory() as own:
            train(config(*overrides), Path(folder or own), memo, losses.extend)
        results.append((losses, memo.reported))
    return results
