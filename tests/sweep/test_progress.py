"""What the terminal shows of a sweep: its bar, its last table, and failed trials."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console as RichConsole

from fsdp_lab.config.status import TrialStatus
from fsdp_lab.config.sweep import Engine
from fsdp_lab.sweep.outputs.console import MOST_ROWS, Console, _where_traced
from fsdp_lab.sweep.outputs.table import trial_table
from fsdp_lab.sweep.state import TrialState
from fsdp_lab.sweep.sweep import Sweep
from tests.sweep.planted import Compose, plan_of, sweep_of


@pytest.fixture
def sweep(compose_trial: Compose, tmp_path: Path) -> Sweep:
    """Four trials, of which the first runs."""
    cells = [[f"training.seed={seed}"] for seed in range(4)]
    run = plan_of(compose_trial, tmp_path, cells, [], ["training.seed"])
    run.prepare(0)
    run.trials[0].status = TrialStatus.starting
    run.begin(0)
    return run


def test_the_bar_is_over_trials_and_their_epochs(sweep: Sweep):
    assert [state.share_done for state in sweep.trials] == [0.0] * 4
    sweep.trials[0].record_epoch({"epoch": 1})
    sweep.trials[1].status = TrialStatus.finished
    assert sum(state.share_done for state in sweep.trials) == 1 + 1 / sweep.trials[0].trial.config.training.epochs
    shown = io.StringIO()
    console = Console(sweep, RichConsole(file=shown, force_terminal=True, width=80))
    with console.bar:
        console.draw()
    assert "1 of 4 trials has a result" in shown.getvalue() and "━" in shown.getvalue()


def test_an_output_that_is_no_terminal_gets_lines_only(sweep: Sweep, capsys: pytest.CaptureFixture[str]):
    shown = io.StringIO()
    console = Console(sweep, RichConsole(file=shown, width=80))
    with console.bar:
        console.began(0)
        console.draw()
    assert shown.getvalue() == ""
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith("s] trial 0 starts: training.seed=0")


@pytest.mark.parametrize("ticks", [True, False])
def test_the_clock_ticks_while_nothing_happens_and_leaves_a_debugger_alone(sweep: Sweep, ticks: bool):
    shown, threads = io.StringIO(), threading.active_count()
    sweep.config = replace(sweep.config, engine=Engine.ray if ticks else Engine.inline)
    with Console(sweep, RichConsole(file=shown, force_terminal=True, width=80)).bar:
        assert threading.active_count() == threads + ticks, "no thread draws beside a debugger"
        until = time.monotonic() + 60
        while ticks and "0:00:02" not in shown.getvalue():
            assert time.monotonic() < until
            time.sleep(0.05)


def test_the_table_has_no_column_that_no_trial_fills(compose_trial: Callable[..., object]):
    state = TrialState(compose_trial([], 0))  # type: ignore[arg-type]
    state.record_epoch({"epoch": 1, "train/loss": 0.5, "perf/samples_per_s": 9.0})
    heads = [column.name for column in trial_table(sweep_of([state]), [(0, state)]).columns]
    assert {"epoch", "train loss", "samples/s"} <= {*heads}
    assert not {"tokens/s", "bits/byte"} & {*heads}


def test_of_many_trials_the_last_table_has_a_few(compose_trial: Callable[..., object]):
    trial = compose_trial([], 0)
    states = [TrialState(trial, TrialStatus.failed) for _ in range(MOST_ROWS + 100)]  # type: ignore[arg-type]
    shown = io.StringIO()
    Console(sweep_of(states), RichConsole(file=shown, width=160)).final()
    assert "50 are below, the recommended ones first; all are in results.csv" in shown.getvalue()
    assert " 49 failed" in shown.getvalue() and " 50 failed" not in shown.getvalue()


def test_a_failed_trial_names_the_file_that_has_its_traceback(tmp_path: Path):
    assert _where_traced(tmp_path) == ""
    (tmp_path / "error.txt").write_text("Traceback")
    assert _where_traced(tmp_path).endswith("error.txt]")
