"""A trial that takes no step is ended; a clock that jumps, or a machine that slept, is not a trial that takes none.

The second between two looks at a trial passes when a test says so.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from fsdp_lab.engine import job
from fsdp_lab.engine.trial_files import Progress, read_failures, read_phase, read_progress


class Seconds:
    """The event for whose setting the watcher waits a second between two looks, and its monotonic clock."""

    def __init__(self) -> None:
        self.now, self._is_set = 0.0, False
        self._waits, self._goes = threading.Semaphore(0), threading.Semaphore(0)

    def wait(self, timeout: float) -> bool:
        self._waits.release()
        self._goes.acquire()
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._goes.release()

    def monotonic(self) -> float:
        return self.now

    def let_pass(self, seconds: int, jump: float = 0.0) -> None:
        """Let the watcher look once a second, with a clock that also jumps in the first one; returns after its look."""
        for second in range(seconds):
            self._waits.acquire()
            self.now += 1.0 + (jump if second == 0 else 0.0)
            self._goes.release()
        self._waits.acquire()
        self._waits.release()


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> Seconds:
    seconds = Seconds()
    monkeypatch.setattr(job, "time", SimpleNamespace(monotonic=seconds.monotonic))
    monkeypatch.setattr(job, "threading", SimpleNamespace(Event=lambda: seconds, Thread=threading.Thread))
    return seconds


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders whose workers' places were taken away; there is no Ray here."""
    folders: list[Path] = []
    monkeypatch.setattr(job, "release_placement_group", folders.append)
    return folders


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_monotonic_clock_that_went_on_in_a_sleep_ends_no_trial(
    has_begun: bool, ended: list[Path], seconds: Seconds, tmp_path: Path
):
    with job.watched(tmp_path, timeout_s=900.0, wait_timeout_s=600.0):
        if has_begun:
            Progress(tmp_path).step(1)
        seconds.let_pass(2)
        seconds.let_pass(3, jump=2000.0)
    assert (ended, read_failures(tmp_path)) == ([], [])


@pytest.mark.parametrize("set_by_s", [2000.0, -2000.0])
def test_a_wall_clock_that_was_set_ends_no_trial_and_hides_no_stuck_one(
    set_by_s: float, ended: list[Path], seconds: Seconds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    real = time.time
    with job.watched(tmp_path, timeout_s=2.0, wait_timeout_s=600.0):
        Progress(tmp_path).step(6)
        seconds.let_pass(1)
        monkeypatch.setattr(time, "time", lambda: real() + set_by_s)
        Progress(tmp_path).step(7)
        seconds.let_pass(3)
        assert ended == []
        seconds.let_pass(1)
        assert ended == [tmp_path]
    assert "no progress for trial_timeout_s=2 s since step 7 began" in read_failures(tmp_path)[0]["message"]


def test_a_trial_that_was_resumed_and_takes_no_step_is_ended(ended: list[Path], seconds: Seconds, tmp_path: Path):
    """It has reported the epochs before, and no step."""
    with job.watched(tmp_path, timeout_s=2.0, wait_timeout_s=600.0):
        Progress(tmp_path).reported()
        seconds.let_pass(4)
        assert ended == [tmp_path]
    assert "since its start" in read_failures(tmp_path)[0]["message"]


def test_progress_of_an_attempt_before_is_none_of_this_one(ended: list[Path], seconds: Seconds, tmp_path: Path):
    Progress(tmp_path).step(7)
    with job.watched(tmp_path, timeout_s=1.0, wait_timeout_s=3.0) as begins:
        begins()
        seconds.let_pass(4)
        assert ended == [], "it may wait for its places"
        seconds.let_pass(1)
        assert ended == [tmp_path]
    assert "since its start" in read_failures(tmp_path)[0]["message"]


def test_a_stuck_phase_is_named(ended: list[Path], seconds: Seconds, tmp_path: Path):
    """Until its first step a trial has the time to wait for its places, too, anew for each phase."""
    with job.watched(tmp_path, timeout_s=1.0, wait_timeout_s=3.0) as begins:
        begins()
        for phase in ("loading the data", "building the model"):
            Progress(tmp_path).phase(phase)
            seconds.let_pass(4)
        assert ended == []
        seconds.let_pass(2)
        assert ended == [tmp_path]
    assert "trial_timeout_s=1 s since building the model began" in read_failures(tmp_path)[0]["message"]


def test_the_first_step_ends_the_phase_before(tmp_path: Path):
    """At once, although steps are written at most once a second."""
    progress = Progress(tmp_path)
    progress.phase("building the model")
    assert read_phase(tmp_path) == "building the model" and "step" not in read_progress(tmp_path)
    progress.step(1)
    assert read_phase(tmp_path) is None and read_progress(tmp_path)["step"] == 1
