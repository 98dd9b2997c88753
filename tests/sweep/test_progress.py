"""What the display says of running trials: their own word, how long it lasts, and what is left."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console as RichConsole

from fsdp_lab.compose import Trial
from fsdp_lab.record.sweep_json import SweepStart
from fsdp_lab.record.trial_files import Progress, write_progress
from fsdp_lab.status import TrialStatus
from fsdp_lab.sweep.listeners.console import Console
from fsdp_lab.sweep.listeners.progress import Doing, Watch, progress_lines, sweep_left_s
from fsdp_lab.sweep.repeats import AutoRepeat
from fsdp_lab.sweep.runner import SweepPlan, SweepRun
from fsdp_lab.sweep.state import SweepState, TrialState

Compose = Callable[[Sequence[str], int], Trial]
STUCK = {"rank": 0, "place": "/home/me/net.py:9 in init", "log": "logs/rank0.log"}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Stops both clocks of this process, and lets them jump forward by so many seconds."""
    ahead, wall, monotonic = [0.0], time.time(), time.monotonic()
    monkeypatch.setattr(time, "time", lambda: wall + ahead[0])
    monkeypatch.setattr(time, "monotonic", lambda: monotonic + ahead[0])

    def jump(seconds: float) -> None:
        ahead[0] += seconds

    return jump


@pytest.fixture
def sweep(compose_trial: Compose, tmp_path: Path) -> SweepRun:
    """Four trials, of which the first runs."""
    trials = [compose_trial([f"training.seed={seed}", "trial_timeout_s=100"], seed) for seed in range(4)]
    state, config = SweepState([TrialState(t) for t in trials], [("val/loss", "min")]), trials[0].config
    run = SweepRun(SweepPlan(state, config, tmp_path, ["training.seed"], SweepStart.of([], True, config)), [])
    run.prepare(0)
    state.trials[0].status = TrialStatus.starting
    run.begin(0)
    return run


class Reported(Progress):
    """What a rank does, as the trial's own process writes it into the folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def phase(self, name: str) -> None:
        super().phase(name)
        write_progress(self._folder, self.content)

    def step(self, step: int) -> None:
        super().step(step)
        write_progress(self._folder, self.content)


def test_a_phase_of_the_worker_is_shown_with_how_long_it_lasts(clock: Callable[[float], None], tmp_path: Path):
    watch, progress = Watch(), Reported(tmp_path)
    assert str(watch.look(0, tmp_path, 0)) == "starting its workers"
    progress.phase("initialising the weights (init=rank0)")
    assert str(watch.look(0, tmp_path, 0)) == "initialising the weights (init=rank0)"
    clock(300)
    assert str(watch.look(0, tmp_path, 0)) == "initialising the weights (init=rank0), for 5 min 0 s"


def test_a_step_is_shown_with_all_steps_and_the_time_that_they_will_take(
    clock: Callable[[float], None], tmp_path: Path
):
    """Resumed at step 11: four steps in 8 s, and 16 are left."""
    watch, progress = Watch(), Reported(tmp_path)
    progress.step(11)
    assert str(watch.look(0, tmp_path, 0)) == "step 11", "how many there are is not known yet"
    for step in range(12, 16):
        clock(2)
        progress.step(step)
    assert str(watch.look(0, tmp_path, 31)) == "step 15 of 31, about 32 s left"


def test_what_lasts_unusually_long_is_reported_once_with_the_place_of_the_stuck_rank(
    clock: Callable[[float], None], tmp_path: Path
):
    watch, progress = Watch(), Reported(tmp_path)

    def unusual() -> str | None:
        return watch.unusual(0, watch.look(0, tmp_path, 0), tmp_path, timeout_s=100.0)

    assert unusual() is None
    clock(80)
    assert unusual() is None, "that workers start may take long, and is told by who waits for them"
    progress.phase("building the model")
    unusual()
    clock(49)
    assert unusual() is None
    clock(3)
    assert unusual() is None, "its ranks were just asked"
    write_progress(tmp_path, {**progress.content, "stuck": STUCK})
    assert unusual() == (
        "building the model has lasted 52 s; rank 0 is at /home/me/net.py:9 in init; its stack is in logs/rank0.log"
    )
    assert unusual() is None
    progress.step(1)
    unusual()
    clock(60)
    assert unusual() == "step 1 has lasted 1 min 0 s"


def test_the_sweep_takes_as_long_as_the_trials_before(compose_trial: Compose):
    """Two at a time: one has 10 s left, one ran 30 of about 100 s; five wait, of 100 s each, and two are to come."""
    trials = [TrialState(compose_trial([], number)) for number in range(9)]
    for trial, seconds in zip(trials[:2], (90.0, 110.0), strict=True):
        trial.status, trial.begun, trial.seconds = TrialStatus.finished, 1.0, seconds
    trials[2].begun = trials[3].begun = 970.0
    doings = {2: Doing("step 9 of 10", 1, 10.0), 3: Doing("building the model", 1)}
    assert sweep_left_s(trials, doings, 2, now=1000.0) == pytest.approx((10 + 70 + 7 * 100) / 2)
    lines = progress_lines(SweepState(trials, []), doings, 2, now=1000.0)
    assert lines == [
        "trial 2: step 9 of 10, about 10 s left", "trial 3: building the model", "the sweep: about 6 min 30 s left",
    ]  # fmt: skip
    assert sweep_left_s(trials[3:], {0: Doing("building the model", 1)}, 0, now=1000.0) is None
    alone = sweep_left_s(trials[2:5], {0: Doing("step 9 of 10", 1, 10.0)}, 0, now=1000.0)
    assert alone == pytest.approx(10 + 2 * (30 + 10)), "the first trial tells what the others will take"


def test_with_repeat_auto_the_time_left_is_that_of_the_round(sweep: SweepRun, clock: Callable[[float], None]):
    """How many rounds follow is not known."""
    repeats = AutoRepeat(sweep.state, lambda: None, lambda overrides, number: None, 4)  # type: ignore[arg-type, return-value]
    for plan, expected in (
        (sweep.plan, "the sweep: about"),
        (replace(sweep.plan, search=repeats), "this round: about"),
    ):
        shown = io.StringIO()
        console = Console(sweep.state, ["training.seed"], RichConsole(file=shown, force_terminal=True, width=80))
        progress = Reported(sweep.folder_of(0))
        sweep.states[0].facts = {"num_steps": 9}
        for step in (1, 2, 3):
            clock(2)
            progress.step(step)
        with console:
            console.tick(SweepRun(plan, []))
            console.update()
        assert expected in shown.getvalue()


def test_the_display_shows_what_the_worker_says(sweep: SweepRun, clock: Callable[[float], None]):
    shown = io.StringIO()
    console = Console(sweep.state, ["training.seed"], RichConsole(file=shown, force_terminal=True, width=80))
    Reported(sweep.folder_of(0)).phase("building the model")
    with console:
        console.tick(sweep)
        clock(59)
        console.tick(sweep)
        console.update()
    text = shown.getvalue()
    assert "trial 0: building the model, for 59 s" in text
    assert "0 of 4 trials have a result, after 59 s" in text
    assert "trial 0: building the model has lasted 59 s" in text


@pytest.mark.parametrize("ticks", [True, False])
def test_the_clock_ticks_while_nothing_happens_and_leaves_a_debugger_alone(sweep: SweepRun, ticks: bool):
    shown, threads = io.StringIO(), threading.active_count()
    with Console(sweep.state, [], RichConsole(file=shown, force_terminal=True, width=80), ticks=ticks):
        assert threading.active_count() == threads + ticks, "no thread draws beside a debugger"
        until = time.monotonic() + 60
        while ticks and "after 2 s" not in shown.getvalue():
            assert time.monotonic() < until
            time.sleep(0.05)
