"""The exported folder says which step left its weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from fsdp_lab.training import train
from tests.ranks import Memo, config, run_ranks
from tests.workloads.hf.cases import WORDS

# Each epoch's learning rate is 50 times the last one's, so that the first epoch is the best.
WORSE = [
    "training.epochs=3", "lr_schedule=step", "lr_schedule.gamma=50", "optimizer.lr=0.01", "checkpoint.mode=sync",
    "export=true",
]  # fmt: skip


def steps(folder: str) -> list[tuple[int, int, int]]:
    """Of the best epoch, of the last, and the one that the folder says; of the best epoch's export, and of the last."""
    collected = []
    for best in ("true", "false"):
        memo, own = Memo(), Path(folder, best)
        own.mkdir()
        train(config(*WORDS["gpt2"], *WORSE, f"checkpoint.export_best={best}"), own, memo)
        reported = min(memo.reported, key=lambda epoch: epoch["val/loss"])
        exported = json.loads((own / "model" / "fsdp_lab.json").read_text())["step"]
        collected.append((int(reported["step"]), int(memo.reported[-1]["step"]), exported))
    return collected


def test_the_folder_says_the_step_of_its_weights(tmp_path: Path) -> None:
    (best, last, exported), (_, _, exported_last) = run_ranks(1, steps, str(tmp_path))[0]
    assert best < last and exported == best and exported_last == last
