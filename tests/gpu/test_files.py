"""Checkpoints, exports and profiles, written from the device and read again."""

from __future__ import annotations

import gzip
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.conftest import Machine
from tests.gpu.ranks import Ranks
from tests.ranks import train_all

pytestmark = pytest.mark.gpu

TRIAL = ("task=language", "data.seq_len=32", "optimizer.lr=0.01", "data.num_train=64", "training.epochs=2")


def train_in(folder: str, words: list[str]) -> tuple[list[float], dict[str, float]]:
    """On one rank: losses of the steps of this start, and metrics of the last epoch."""
    ((losses, epochs),) = train_all([[*TRIAL, *words]], folder)
    return losses, epochs[-1]


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize(
    "cell", ["sharding=per_block", "sharding=root precision=fp16 offload=cpu", "sharding=ddp precision=bf16_mixed"]
)
def test_a_resumed_trial_learns_the_same_to_the_bit(
    mode: str, cell: str, ranks: Ranks, tmp_path: Path, figures: Callable[..., None]
) -> None:
    words = [*cell.split(), f"checkpoint.mode={mode}", "export=true"]
    whole, last = ranks.run(train_in, str(tmp_path / "whole"), words)[0]
    first, _ = ranks.run(train_in, str(tmp_path / "parts"), [*words, "training.max_steps=2"])[0]
    second, metrics = ranks.run(train_in, str(tmp_path / "parts"), words)[0]
    saved = {name: last[f"checkpoint/{name}"] for name in ("blocked_s", "save_s", "bytes")}
    figures(steps=len(whole), **saved)
    assert [*first, *second] == whole and len(first) == 2 < len(whole)
    assert metrics["val/loss"] == last["val/loss"]
    exported = [torch.load(tmp_path / run / "model.pt", weights_only=True)["state_dict"] for run in ("whole", "parts")]
    assert all(torch.equal(value, exported[1][name]) for name, value in exported[0].items())
    assert all(value.device.type == "cpu" and value.dtype is torch.float32 for value in exported[0].values())


def test_profiles_are_written_and_open(
    machine: Machine, ranks: Ranks, tmp_path: Path, figures: Callable[..., None]
) -> None:
    words = ["sharding=per_block", "memory_profile=timeline", "profile_trace=true", "training.epochs=1",
             "data.num_train=256", "precision=bf16_mixed"]  # fmt: skip
    ranks.run(train_in, str(tmp_path), words)
    for rank in range(machine.ranks):
        assert "blocks.1" in (tmp_path / f"memory_timeline_rank{rank}.html").read_text(), "the page names the blocks"
    with gzip.open(tmp_path / "trace_rank0.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    kinds = {event.get("cat") for event in events}
    figures(trace_events=len(events))
    assert "cpu_op" in kinds
    if machine.cuda:
        assert "kernel" in kinds
        snapshot: Any = pickle.loads((tmp_path / "memory_snapshot_rank0.pickle").read_bytes())  # of our own rank
        figures(segments=len(snapshot["segments"]))
        assert snapshot["segments"] and any(snapshot["device_traces"])
