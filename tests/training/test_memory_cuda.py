"""What a trial says of a GPU's memory. The allocator here stands for a GPU's, which cannot be had: its statistics are
numbers that the test sets. `tests/gpu/test_memory.py` reads a real one."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_lab.config.training import MemoryProfile as Detail
from fsdp_lab.training import memory as module
from fsdp_lab.training.distributed import DistributedContext
from fsdp_lab.training.memory import MemoryProfiler, start_clean
from fsdp_lab.training.profile import Event, Profile
from tests.ranks import config

GPU = torch.device("cuda", 0)


class Allocator:
    """`torch.cuda`'s functions as far as a profile calls them; `done` are the calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.peaks = {"requested_bytes": 0, "active_bytes": 0, "reserved_bytes": 0}
        self.done: list[str] = []
        monkeypatch.setattr(gc, "collect", lambda: self.done.append("collect"))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: self.done.append("empty"))
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)
        monkeypatch.setattr(
            torch.cuda, "memory_stats", lambda device: {f"{k}.all.peak": v for k, v in self.peaks.items()}
        )
        monkeypatch.setattr(module, "free_cublas_workspaces", lambda device: 64)
        monkeypatch.setattr(module, "gather", lambda mine: [mine])

    def reset(self, device: torch.device) -> None:
        self.done.append("reset")
        self.hold(0, 0, 0)

    def hold(self, requested: int, active: int, reserved: int) -> None:
        """Let the peaks since the last reset be these."""
        self.peaks = {"requested_bytes": requested, "active_bytes": active, "reserved_bytes": reserved}


class FakeRecorder:
    def __init__(self, held: int) -> None:
        self.profile = Profile([Event(0, "device", "param", held, "", "forward")])

    def __enter__(self) -> FakeRecorder:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def finish(self) -> Profile:
        return self.profile.with_peaks()


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    return Allocator(monkeypatch)


def followed(allocator: Allocator, monkeypatch: pytest.MonkeyPatch, folder: Path) -> MemoryProfiler:
    """A profile after the two steps that are followed; the second held 700 bytes of tensors."""
    monkeypatch.setattr(module, "record_step", lambda *args: FakeRecorder(700))
    trial = replace(config(), memory_profile=Detail.peaks)
    memory = MemoryProfiler(trial, "a model", DistributedContext(0, 0, 1, GPU), folder)
    while memory.tracks():
        with memory.track(torch.nn.Linear(1, 1), None, []):  # type: ignore[arg-type]
            allocator.hold(1000, 2000, 4000)
    return memory


def test_what_tensors_asked_for_is_distinguished_from_blocks_and_from_what_is_reserved(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    memory = followed(allocator, monkeypatch, tmp_path)
    memory.step_done()
    allocator.hold(864, 1536, 2048)
    figures = memory.figures()
    assert figures["memory/peak_bytes"] == 864 - 64, "without cuBLAS's workspaces, which no forecast of tensors has"
    assert figures["memory/workspace_bytes"] == 64
    assert figures["memory/active_bytes"] == 1536
    assert figures["memory/reserved_bytes"] == 2048
    assert figures["memory/other_bytes"] == 800 - 700
    written = json.loads((tmp_path / "memory_peaks_rank0.json").read_text())
    assert written["allocator"] == {
        f"{name}_bytes": figures[f"memory/{name}_bytes"] for name in ("active", "reserved", "workspace", "peak")
    }
    assert written["peaks"]["device"]["total"] == 700


def test_a_followed_step_is_not_in_the_peak_of_those_that_train(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    memory = followed(allocator, monkeypatch, tmp_path)
    assert allocator.done == ["collect", "empty", "reset"] * 2, "before the first step, and after the last followed"
    assert memory.figures()["memory/reserved_bytes"] == 4000, "no other step was taken"
    memory.step_done()
    allocator.hold(900, 1800, 3000)
    assert memory.figures()["memory/reserved_bytes"] == 3000


def test_a_trial_gives_back_what_the_one_before_left_and_then_forgets_its_peak(allocator: Allocator):
    start_clean(GPU)
    assert allocator.done == ["collect", "empty", "reset"]
    start_clean(torch.device("cpu"))
    assert len(allocator.done) == 3
