"""What fails ends as a result, and the process trains on."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.gpu.conftest import Machine
from tests.gpu.ranks import Ranks
from tests.ranks import Memo, config

pytestmark = pytest.mark.gpu

SMALL = ("model=vit_tiny", "data=synthetic", "data.num_train=96", "data.num_val=32", "memory_profile=peaks")
GPU_BYTES = 600 * 2**20  # what a trial may have of a GPU: the parameters of ViT-B and their gradients do not fit
LARGE = ["model=vit_b_16"]
LARGE_ON_A_CPU = ["model=mlp", f"model.hidden_dim={2**40}"]  # more than any address: the allocator touches nothing


def outcome(words: list[str]) -> tuple[str, dict[str, Any], list[str]]:
    """On one rank: the status of a trial, the values of its reason, and the files that it left."""
    from fsdp_lab.engine.rank import train_rank
    from fsdp_lab.record.trial_json import RankFailure

    # A trial leaves its process group when it is through; these ranks train another one.
    kept = mock.patch("fsdp_lab.training.distributed.leave_process_group")
    with tempfile.TemporaryDirectory() as folder, kept:
        memo = Memo()
        try:
            train_rank(config(*SMALL, *words), Path(folder), int(os.environ["RANK"]), memo)
        except RankFailure as failure:
            return failure.reason.status, failure.reason.values, os.listdir(folder)
        return ("finished" if memo.reported else "no outcome"), {}, []


def large_then_small(large: list[str]) -> list[Any]:
    if not torch.cuda.is_available():
        return [outcome(large), outcome([])]
    torch.cuda.set_per_process_memory_fraction(GPU_BYTES / torch.cuda.get_device_properties(0).total_memory)
    try:
        return [outcome(large), outcome([])]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.fixture
def one_rank(machine: Machine, ranks: Ranks) -> Iterator[Ranks]:
    if machine.ranks == 1:
        yield ranks
        return
    yield (one := Ranks(1, machine.cuda))
    one.end()


def test_out_of_memory_is_an_outcome(machine: Machine, one_rank: Ranks, figures: Callable[..., None]) -> None:
    (large, small), *_ = one_rank.run(large_then_small, LARGE if machine.cuda else LARGE_ON_A_CPU)
    status, values, files = large
    figures(status=status, then=small[0], at=values.get("at"), text=values.get("text"))
    assert (status, small[0]) == ("oom", "finished")
    assert "allocate" in values["text"], "the tensor"
    if machine.cuda:  # the one on a CPU fails before the first step
        assert values["at"].startswith("step 1, ") and "encoder" in values["at"], "the unit"
        assert "memory_peaks_rank0.json" in files, "the last profile"


def test_nan_is_divergence(ranks: Ranks, figures: Callable[..., None]) -> None:
    words = ["optimizer=sgd", "optimizer.lr=1e30", "training.epochs=3"]
    for status, values, _ in ranks.run(outcome, words):
        figures(text=values.get("text"))
        assert status == "diverged" and "loss of step" in values["text"]
