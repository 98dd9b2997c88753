"""The live table, as a terminal shows it."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from rich.console import Console as RichConsole

from fsdp_lab.record.failures import RankFailure, record_failure
from fsdp_lab.record.reasons import Code, Reason, TimingExcluded
from fsdp_lab.record.trial import why_timing_is_excluded
from fsdp_lab.report.answer import answer
from fsdp_lab.status import TrialStatus
from fsdp_lab.sweep.listeners.console import Console, _where_traced
from fsdp_lab.sweep.listeners.table import MOST_ROWS, rows_to_keep, trial_table
from fsdp_lab.sweep.runner import SweepRun
from fsdp_lab.sweep.state import SweepState, TrialState
from tests.report.sweeps import on_cpu
from tests.report.sweeps import sweep as made_up


def test_the_mark_of_a_speed_is_explained(compose_trial: Callable[..., object]):
    for others, shows_note in ((0.3, True), (0.2, False)):
        state = TrialState(compose_trial([], 0))  # type: ignore[arg-type]
        state.status = TrialStatus.finished
        state.metrics = {"epoch": 1, "perf/samples_per_s": 9.0, "perf/others_cpu": others}
        shown = io.StringIO()
        state.timing_excluded = why_timing_is_excluded({"device": "cpu"}, state.metrics, 0.25)
        Console(SweepState([state], []), [], RichConsole(file=shown, width=160)).final()
        note = "† Timing excluded: other processes used more than 25 % of the cores."
        assert (note in shown.getvalue()) == ("9.0†" in shown.getvalue() or "9†" in shown.getvalue()) == shows_note


def test_what_is_chosen_by_memory_alone_is_not_marked_as_recommended(compose_trial: Callable[..., object]):
    states = [TrialState(compose_trial([], number), TrialStatus.finished) for number in range(2)]  # type: ignore[arg-type]
    for others, recommended in ((0.0, True), (0.9, False)):
        rows = [on_cpu(n, 2 * n, others, 1000.0) for n in range(2)]
        shown = io.StringIO()
        Console(SweepState(states, []), [], RichConsole(file=shown, width=160)).final(answer(made_up(rows)))
        assert ("No setting is recommended" in shown.getvalue()) is not recommended
        assert any(line.startswith("> ") for line in shown.getvalue().splitlines()) is recommended


def test_the_table_has_no_column_that_no_trial_fills(compose_trial: Callable[..., object]):
    state = TrialState(compose_trial([], 0))  # type: ignore[arg-type]
    state.metrics = {"epoch": 1, "train/loss": 0.5, "perf/samples_per_s": 9.0}
    heads = [column.name for column in trial_table(SweepState([state], []), [], [(0, state)]).columns]
    assert {"epoch", "train loss", "samples/s"} <= {*heads}
    assert not {"tokens/s", "bits/byte"} & {*heads}


def test_of_many_trials_lines_count_those_that_finish(compose_trial: Callable[..., object]):
    trial = compose_trial([], 0)
    states = [TrialState(trial) for _ in range(MOST_ROWS + 1)]  # type: ignore[arg-type]
    console = Console(SweepState(states, [("val/loss", "min")]), [], RichConsole(file=io.StringIO(), width=160))
    logged: list[str] = []
    console.log = logged.append  # type: ignore[method-assign]
    sweep = cast(SweepRun, SimpleNamespace(log_once=lambda text: logged.append(text) if text not in logged else None))
    for number, state in enumerate(states):
        console.began(sweep, number)
        state.status, state.metrics = TrialStatus.finished, {"epoch": 1, "val/loss": float(number)}
        console.epoch(sweep, number, state.metrics)
        console.ended(sweep, number)
    assert logged[0].startswith("more than 500 trials: ")
    assert [line.partition(",")[0] for line in logged[1:]] == [
        f"{done} of 501 trials have a result" for done in (100, 200, 300, 400, 500)
    ]


def test_of_many_trials_the_last_table_has_the_best(compose_trial: Callable[..., object]):
    trial = compose_trial([], 0)
    states = [TrialState(trial, TrialStatus.finished) for _ in range(MOST_ROWS + 100)]  # type: ignore[arg-type]
    for number, state in enumerate(states):
        state.metrics = {"epoch": 1, "val/loss": 1.0 + number, "perf/samples_per_s": 1.0 + number}
    sweep = SweepState(states, [("val/loss", "min")])
    rows = rows_to_keep(sweep, list(enumerate(states)), {300})
    assert [number for number, _ in rows] == [*range(50), 300, *range(550, 600)]
    few = list(enumerate(states))[:MOST_ROWS]
    assert rows_to_keep(sweep, few, {300}) == few
    shown = io.StringIO()
    Console(sweep, [], RichConsole(file=shown, width=160)).final()
    assert "the best 100 are below; all are in results.csv" in shown.getvalue()


def test_of_many_trials_a_speed_beside_others_is_none_of_the_best(compose_trial: Callable[..., object]):
    trial = compose_trial([], 0)
    states = [TrialState(trial, TrialStatus.finished) for _ in range(MOST_ROWS + 100)]  # type: ignore[arg-type]
    for number, state in enumerate(states):
        state.timing_excluded = TimingExcluded.others_cpu if number >= 550 else None
        state.metrics = {"epoch": 1, "val/loss": 1.0 + number, "perf/samples_per_s": 1.0 + number}
    rows = rows_to_keep(SweepState(states, [("val/loss", "min")]), list(enumerate(states)), ())
    assert [number for number, _ in rows] == [*range(50), *range(500, 550)]


def test_of_many_trials_of_which_none_finished_the_last_table_has_the_first(compose_trial: Callable[..., object]):
    trial = compose_trial([], 0)
    states = [TrialState(trial, TrialStatus.failed) for _ in range(MOST_ROWS + 100)]  # type: ignore[arg-type]
    sweep = SweepState(states, [("val/loss", "min")])
    assert [number for number, _ in rows_to_keep(sweep, list(enumerate(states)), ())] == [*range(50)]
    shown = io.StringIO()
    Console(sweep, [], RichConsole(file=shown, width=160)).final()
    assert "the first 50 are below; all are in results.csv" in shown.getvalue()


@pytest.mark.parametrize(("code", "named"), [("error", "logs/rank1.log"), ("killed", "failures/rank1.json")])
def test_a_failed_trial_names_the_file_that_has_its_traceback(code: str, named: str, tmp_path: Path):
    """A rank's log lacks what Ray reports."""
    record_failure(tmp_path, RankFailure(Reason.of(Code(code), rank=1), "Traceback"))
    assert _where_traced(tmp_path).endswith("failures/rank1.json]"), "there is no log"
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank1.log").write_text("Traceback")
    assert _where_traced(tmp_path).endswith(f"{named}]")
