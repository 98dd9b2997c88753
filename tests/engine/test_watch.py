"""A trial that takes no step is ended; a clock that jumps, or a machine that slept, is not a trial that takes none."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from fsdp_lab.engine import job
from fsdp_lab.engine.trial_files import Progress, read_failures, read_phase, read_progress

_real = {"time": time.time, "monotonic": time.monotonic}


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders whose workers' places were taken away; there is no Ray here."""
    folders: list[Path] = []
    monkeypatch.setattr(job, "release_placement_group", folders.append)
    return folders


@pytest.mark.parametrize("clock", ["time", "monotonic"])
@pytest.mark.parametrize("has_begun", [True, False])
def test_a_clock_that_jumps_forward_ends_no_trial(
    clock: str, has_begun: bool, ended: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The wall clock after it was set or the machine slept; and a monotonic one that went on in a sleep."""
    with job.watched(tmp_path, timeout_s=900.0, wait_timeout_s=600.0):
        if has_begun:
            Progress(tmp_path).step(1)
        time.sleep(1.5)
        monkeypatch.setattr(time, clock, lambda: _real[clock]() + 2000)
        time.sleep(2.5)
    assert (ended, read_failures(tmp_path)) == ([], [])


def test_a_clock_that_was_set_back_hides_no_stuck_trial(
    ended: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with job.watched(tmp_path, timeout_s=2.0, wait_timeout_s=600.0):
        monkeypatch.setattr(time, "time", lambda: _real["time"]() - 2000)
        Progress(tmp_path).step(7)
        wait_for_end(ended)
    assert "no progress for trial_timeout_s=2 s since step 7 began" in read_failures(tmp_path)[0]["message"]


def test_a_trial_that_was_resumed_and_takes_no_step_is_ended(ended: list[Path], tmp_path: Path):
    """It has reported the epochs before, and no step."""
    with job.watched(tmp_path, timeout_s=2.0, wait_timeout_s=600.0):
        Progress(tmp_path).reported()
        wait_for_end(ended)
    assert "since its start" in read_failures(tmp_path)[0]["message"]


def test_progress_of_an_attempt_before_is_none_of_this_one(ended: list[Path], tmp_path: Path):
    Progress(tmp_path).step(7)
    with job.watched(tmp_path, timeout_s=0.5, wait_timeout_s=2.0) as begins:
        begins()
        time.sleep(1.7)
        assert ended == [], "it may wait for its places"
        wait_for_end(ended)
    assert "since its start" in read_failures(tmp_path)[0]["message"]


def test_a_stuck_phase_is_named(ended: list[Path], tmp_path: Path):
    """Until its first step a trial has the time to wait for its places, too, anew for each phase."""
    with job.watched(tmp_path, timeout_s=0.5, wait_timeout_s=2.0) as begins:
        begins()
        Progress(tmp_path).phase("loading the data")
        time.sleep(1.7)
        Progress(tmp_path).phase("building the model")
        time.sleep(1.7)
        assert ended == []
        wait_for_end(ended)
    assert "trial_timeout_s=0.5 s since building the model began" in read_failures(tmp_path)[0]["message"]


def test_the_first_step_ends_the_phase_before(tmp_path: Path):
    """At once, although steps are written at most once a second."""
    progress = Progress(tmp_path)
    progress.phase("building the model")
    assert read_phase(tmp_path) == "building the model" and "step" not in read_progress(tmp_path)
    progress.step(1)
    assert read_phase(tmp_path) is None and read_progress(tmp_path)["step"] == 1


def wait_for_end(ended: list[Path]) -> None:
    until = _real["monotonic"]() + 30
    while not ended and _real["monotonic"]() < until:
        time.sleep(0.05)
    assert ended
