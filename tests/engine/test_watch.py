"""A trial that takes no step is ended; a clock that jumps, or a machine that slept, is not a trial that takes none."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from fsdp_lab.engine import job
from fsdp_lab.engine.job import Watch
from fsdp_lab.record.failures import read_failures
from fsdp_lab.record.trial_files import Progress, read_progress
from fsdp_lab.report.reason_texts import reason_text


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders whose workers' places were taken away; there is no Ray here."""
    folders: list[Path] = []
    monkeypatch.setattr(job, "release_placement_group", folders.append)
    return folders


def let_pass(watch: Watch, progress: Progress, seconds: int) -> None:
    """Look once a second."""
    for _ in range(seconds):
        watch.look(progress.content, passed_s=1.0)


def test_a_monotonic_clock_that_went_on_in_a_sleep_ends_no_trial(ended: list[Path], tmp_path: Path):
    """The watcher sees 2,000 s pass between two looks, of which it counts a few."""
    clock, asked = [0.0], 0
    watch, progress = Watch(tmp_path, timeout_s=900.0, wait_timeout_s=600.0), Progress()
    progress.step(1)

    def ask() -> dict[str, float | str]:
        nonlocal asked
        asked, clock[0] = asked + 1, clock[0] + (2000.0 if asked == 2 else 1.0)
        if asked == 6:
            watch._over.set()
        return progress.content

    watch.ask = ask
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job.time, "monotonic", lambda: clock[0])
        patch.setattr(watch._over, "wait", lambda seconds: watch._over.is_set())
        watch._watch()
    assert asked == 6 and (ended, read_failures(tmp_path)) == ([], [])


@pytest.mark.parametrize("set_by_s", [2000.0, -2000.0])
def test_a_wall_clock_that_was_set_ends_no_trial_and_hides_no_stuck_one(
    set_by_s: float, ended: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    real = time.time
    watch, progress = Watch(tmp_path, timeout_s=2.0, wait_timeout_s=600.0), Progress()
    progress.step(6)
    let_pass(watch, progress, 1)
    monkeypatch.setattr(time, "time", lambda: real() + set_by_s)
    progress.step(7)
    let_pass(watch, progress, 3)
    assert ended == []
    let_pass(watch, progress, 1)
    assert ended == [tmp_path]
    assert "no progress for trial_timeout_s=2 s since step 7 began" in reason_text(read_failures(tmp_path)[0].reason)


def test_a_trial_that_was_resumed_and_takes_no_step_is_ended(ended: list[Path], tmp_path: Path):
    """It has reported the epochs before, and no step."""
    watch, progress = Watch(tmp_path, timeout_s=2.0, wait_timeout_s=600.0), Progress()
    progress.reported()
    let_pass(watch, progress, 4)
    assert ended == [tmp_path]
    assert "since its start" in reason_text(read_failures(tmp_path)[0].reason)


def test_a_rank_that_answers_nothing_may_wait_for_its_places_and_is_ended_then(ended: list[Path], tmp_path: Path):
    watch = Watch(tmp_path, timeout_s=1.0, wait_timeout_s=3.0)
    watch.begin()
    for _ in range(4):
        watch.look(None, passed_s=1.0)
    assert ended == [], "it may wait for its places"
    watch.look(None, passed_s=1.0)
    assert ended == [tmp_path]
    assert "since its start" in reason_text(read_failures(tmp_path)[0].reason)


def test_a_stuck_phase_is_named(ended: list[Path], tmp_path: Path):
    """Until its first step a trial has the time to wait for its places, too, anew for each phase."""
    watch, progress = Watch(tmp_path, timeout_s=1.0, wait_timeout_s=3.0), Progress()
    for phase in ("loading the data", "building the model"):
        progress.phase(phase)
        let_pass(watch, progress, 5)
    assert ended == []
    let_pass(watch, progress, 1)
    assert ended == [tmp_path]
    assert "trial_timeout_s=1 s since building the model began" in reason_text(read_failures(tmp_path)[0].reason)


def doing(folder: Path) -> tuple[str | None, int | None]:
    progress = read_progress(folder)
    return progress.phase, progress.step


def test_the_first_step_ends_the_phase_before(tmp_path: Path):
    watch, progress = Watch(tmp_path, timeout_s=1.0, wait_timeout_s=3.0), Progress()
    progress.phase("building the model")
    let_pass(watch, progress, 1)
    assert doing(tmp_path) == ("building the model", None)
    progress.step(1)
    let_pass(watch, progress, 1)
    assert doing(tmp_path) == (None, 1)
