"""What the terminal shows of a sweep: its bar, its last table, and failed trials."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console as RichConsole

from fsdp_lab.config.status import TrialStatus
from fsdp_lab.sweep.listeners.console import MOST_ROWS, Console, _where_traced
from fsdp_lab.sweep.listeners.progress import share_done
from fsdp_lab.sweep.listeners.table import trial_table
from fsdp_lab.sweep.runner import SweepRun
from fsdp_lab.sweep.state import SweepState, TrialState
from tests.sweep.planted import Compose, plan_of


@pytest.fixture
def sweep(compose_trial: Compose, tmp_path: Path) -> SweepRun:
    """Four trials, of which the first runs."""
    cells = [[f"training.seed={seed}"] for seed in range(4)]
    run = SweepRun(plan_of(compose_trial, tmp_path, cells, [], ["training.seed"]), [])
    run.prepare(0)
    run.states[0].status = TrialStatus.starting
    run.begin(0)
    return run


def test_the_bar_is_over_trials_and_their_epochs(sweep: SweepRun):
    assert [share_done(state) for state in sweep.states] == [0.0] * 4
    sweep.states[0].metrics = {"epoch": 1}
    sweep.states[1].status = TrialStatus.finished
    assert sum(map(share_done, sweep.states)) == 1 + 1 / sweep.states[0].trial.config.training.epochs
    shown = io.StringIO()
    with Console(sweep.state, [], RichConsole(file=shown, force_terminal=True, width=80)) as console:
        console.changed(sweep, 0)
    assert "1 of 4 trials has a result" in shown.getvalue() and "━" in shown.getvalue()


def test_an_output_that_is_no_terminal_gets_lines_only(sweep: SweepRun, capsys: pytest.CaptureFixture[str]):
    shown = io.StringIO()
    with Console(sweep.state, ["training.seed"], RichConsole(file=shown, width=80)) as console:
        console.began(sweep, 0)
        console.changed(sweep, 0)
    assert shown.getvalue() == ""
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith("s] trial 0 starts: training.seed=0")


@pytest.mark.parametrize("ticks", [True, False])
def test_the_clock_ticks_while_nothing_happens_and_leaves_a_debugger_alone(sweep: SweepRun, ticks: bool):
    shown, threads = io.StringIO(), threading.active_count()
    with Console(sweep.state, [], RichConsole(file=shown, force_terminal=True, width=80), ticks=ticks):
        assert threading.active_count() == threads + ticks, "no thread draws beside a debugger"
        until = time.monotonic() + 60
        while ticks and "0:00:02" not in shown.getvalue():
            assert time.monotonic() < until
            time.sleep(0.05)


def test_the_table_has_no_column_that_no_trial_fills(compose_trial: Callable[..., object]):
    state = TrialState(compose_trial([], 0))  # type: ignore[arg-type]
    state.metrics = {"epoch": 1, "train/loss": 0.5, "perf/samples_per_s": 9.0}
    heads = [column.name for column in trial_table(SweepState([state], []), [], [(0, state)]).columns]
    assert {"epoch", "train loss", "samples/s"} <= {*heads}
    assert not {"tokens/s", "bits/byte"} & {*heads}


def test_of_many_trials_the_last_table_has_a_few(compose_trial: Callable[..., object]):
    trial = compose_trial([], 0)
    states = [TrialState(trial, TrialStatus.failed) for _ in range(MOST_ROWS + 100)]  # type: ignore[arg-type]
    shown = io.StringIO()
    Console(SweepState(states, []), [], RichConsole(file=shown, width=160)).final()
    assert "50 are below, the recommended ones first; all are in results.csv" in shown.getvalue()
    assert " 49 failed" in shown.getvalue() and " 50 failed" not in shown.getvalue()


def test_a_failed_trial_names_the_file_that_has_its_traceback(tmp_path: Path):
    assert _where_traced(tmp_path) == ""
    (tmp_path / "error.txt").write_text("Traceback")
    assert _where_traced(tmp_path).endswith("error.txt]")
