"""TF32 of a trial: which of them compute in it, and that a process computes afterwards as before."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fsdp_lab.config.notes import cpu_notes, gpu_notes
from fsdp_lab.config.trial import TrialConfig
from fsdp_lab.training.distributed import DistributedContext
from fsdp_lab.training.train import train
from tests.ranks import Memo, config

TRAINING = sys.modules["fsdp_lab.training.train"]  # `train` is the function, too


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    assert torch.get_float32_matmul_precision() == "highest"


def trial(device: str, words: str, patch: pytest.MonkeyPatch, fails: bool = False) -> str:
    """Return how a trial on a device would multiply float32 matrices."""
    seen = []

    def followed(*_: object) -> None:
        seen.append(torch.get_float32_matmul_precision())
        if fails:
            raise RuntimeError("planted")

    patch.setattr(TRAINING, "setup_distributed", lambda _: DistributedContext(0, 0, 1, torch.device(device)))
    patch.setattr(TRAINING, "start_clean", lambda _: None)
    patch.setattr(TRAINING, "_train", followed)
    train(config(*words.split()), Path("unused"), Memo())
    return seen[0]


def test_only_a_gpu_and_only_with_tf32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert trial("cuda:0", "precision=tf32", monkeypatch) == "high"
    assert trial("cuda:0", "precision=fp32", monkeypatch) == "highest"
    assert trial("cuda:0", "precision=fp32 precision.reduce_dtype=bfloat16 precision.tf32=true", monkeypatch) == "high"
    assert trial("cpu", "precision=tf32", monkeypatch) == "highest"


def test_a_failed_trial_leaves_the_process_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.set_float32_matmul_precision("medium")
    try:
        with pytest.raises(RuntimeError, match="planted"):
            trial("cuda:0", "precision=tf32", monkeypatch, fails=True)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    ("words", "has_tf32", "expected"),
    [
        ("precision=fp32", True, "precision=tf32 multiplies them in TF32"),
        ("precision=grad_bf16", True, "precision=tf32 multiplies them in TF32"),
        ("precision=fp32", False, None),
        ("precision=tf32", True, None),
        ("precision=tf32", False, "has no effect on this GPU"),
        ("precision=bf16", True, None),
    ],
)
def test_what_a_trial_on_a_gpu_says(words: str, has_tf32: bool, expected: str | None) -> None:
    settings: TrialConfig = config(words)
    notes = list(gpu_notes(settings, has_tf32))
    assert len(notes) == (expected is not None) and all(str(expected) in note for note in notes)
    assert bool(list(cpu_notes(settings))) is settings.precision.tf32
