"""A machine that others use: how much of its cores they have. What it means for nights is in test_gate.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from fsdp_lab.machine import cpu_contention
from fsdp_lab.machine.cpu_contention import Window, _busy_s, _family_s
from tests.conftest import INLINE, run_cli
from tests.folders import TrialFolder

GONE = 7  # a process that has ended


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the window of a machine of two cores reads: the time, the seconds that all and that our processes used."""
    values: dict[str, Any] = {"time": 100.0, "busy": 1000.0, "ours": {1: 5.0, GONE: 1.0}}
    monkeypatch.setattr(cpu_contention, "time", SimpleNamespace(monotonic=lambda: values["time"]))
    monkeypatch.setattr(cpu_contention, "_busy_s", lambda: values["busy"])
    monkeypatch.setattr(cpu_contention, "_family_s", lambda roots: dict(values["ours"]))
    monkeypatch.setattr(cpu_contention.os, "cpu_count", lambda: 2)
    return values


def test_what_others_compute_is_distinguished_from_our_own(readings: dict[str, Any]):
    window = Window()
    readings |= {"time": 110.0, "busy": 1012.0, "ours": {1: 12.0, 2: 1.0}}  # 8 s of 12 were ours, in 20 core seconds
    assert window.share() == pytest.approx((12 - 8) / 20)
    readings |= {"time": 120.0, "busy": 1022.0, "ours": {1: 22.0}}  # one of ours has ended; all of this was ours
    assert window.share() == pytest.approx((22 - 18) / 40)
    readings |= {"busy": 900.0}  # a clock of the kernel that was set back
    assert window.share() == 0.0


def test_the_seconds_of_our_descendants_are_ours():
    """A child that uses a third of a second of a core, however long that takes, and stays."""
    burns = "import sys, time\nwhile time.process_time() < 0.3: pass\nprint('burned', flush=True)\nsys.stdin.read()"
    before = sum(_family_s((psutil.Process(),)).values()), _busy_s()
    with subprocess.Popen([sys.executable, "-c", burns], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as burning:
        assert burning.stdout is not None and burning.stdout.readline() == b"burned\n"
        after = sum(_family_s((psutil.Process(),)).values()), _busy_s()
    assert after[0] - before[0] > 0.25
    assert after[1] - before[1] > 0.15, "the kernel's count of all processes is by ticks"


@pytest.mark.ci
def test_a_trial_measures_what_others_compute_while_it_is_timed(tmp_path: Path):
    """A burning process that is not the trial's: it has a core of this machine's to itself, or a share of one."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as burning:
        try:
            done = run_cli(tmp_path, *INLINE, "training.epochs=1", "data.num_train=2048")
        finally:
            burning.kill()
    assert done.returncode == 0, done.stderr
    (epoch,) = TrialFolder(tmp_path / "out", tmp_path / "out").epochs
    assert 0.3 / (os.cpu_count() or 1) < epoch["perf/others_cpu"] <= 1
