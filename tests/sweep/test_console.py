"""The last table of a sweep, and what is logged of a failed trial."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console as RichConsole

from fsdp_lab.record.failures import RankFailure, record_failure
from fsdp_lab.record.reasons import Code, Reason, why_timing_is_excluded
from fsdp_lab.report.answer import answer
from fsdp_lab.status import TrialStatus
from fsdp_lab.sweep.listeners.console import MOST_ROWS, Console, _where_traced
from fsdp_lab.sweep.listeners.table import trial_table
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


def test_of_many_trials_the_last_table_has_a_few(compose_trial: Callable[..., object]):
    trial = compose_trial([], 0)
    states = [TrialState(trial, TrialStatus.failed) for _ in range(MOST_ROWS + 100)]  # type: ignore[arg-type]
    shown = io.StringIO()
    Console(SweepState(states, []), [], RichConsole(file=shown, width=160)).final()
    assert "50 are below, the recommended ones first; all are in results.csv" in shown.getvalue()
    assert " 49 failed" in shown.getvalue() and " 50 failed" not in shown.getvalue()


@pytest.mark.parametrize(("code", "named"), [("error", "logs/rank1.log"), ("killed", "failures/rank1.json")])
def test_a_failed_trial_names_the_file_that_has_its_traceback(code: str, named: str, tmp_path: Path):
    """A rank's log lacks what Ray reports."""
    record_failure(tmp_path, RankFailure(Reason.of(Code(code), rank=1), "Traceback"))
    assert _where_traced(tmp_path).endswith("failures/rank1.json]"), "there is no log"
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank1.log").write_text("Traceback")
    assert _where_traced(tmp_path).endswith(f"{named}]")
