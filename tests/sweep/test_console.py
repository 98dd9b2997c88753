"""The last table of a sweep, and what is logged of a failed trial."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console as RichConsole

from fsdp_lab.record.failures import RankFailure, record_failure
from fsdp_lab.record.reasons import Code, Reason
from fsdp_lab.status import TrialStatus
from fsdp_lab.sweep.listeners.console import MOST_ROWS, Console, _where_traced
from fsdp_lab.sweep.listeners.table import trial_table
from fsdp_lab.sweep.state import SweepState, TrialState


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
