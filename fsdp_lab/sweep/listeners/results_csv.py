"""`results.csv`: a row a trial, with the latest of each figure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from fsdp_lab.config.convert import value_text
from fsdp_lab.record.results_csv import write_results
from fsdp_lab.record.sweep import SweepRecord
from fsdp_lab.report.reason_texts import reason_text
from fsdp_lab.status import TrialStatus
from fsdp_lab.sweep.listeners.pace import Pace
from fsdp_lab.sweep.names import setting
from fsdp_lab.sweep.runner import Ending, Listener, SweepRun
from fsdp_lab.sweep.state import TrialState

if TYPE_CHECKING:
    import pandas as pd


class ResultsCsv(Listener):
    """Keeps the file up to date, at most a second late, or with thousands of trials some: a resume makes it anew."""

    def __init__(self, run_id: Callable[[int], str]) -> None:
        self._run_id = run_id
        self._pace, self._stale, self._unwritable = Pace(), False, False

    def opened(self, sweep: SweepRun) -> None:
        self._write(sweep)

    def changed(self, sweep: SweepRun, number: int) -> None:
        self._stale = True
        self.tick(sweep)

    def tick(self, sweep: SweepRun) -> None:
        if self._stale and self._pace.is_due:
            self._write(sweep)

    def closing(self, sweep: SweepRun, ending: Ending) -> None:
        self._write(sweep)

    def closed(self, sweep: SweepRun, ending: Ending) -> None:
        self._write(sweep)

    def _write(self, sweep: SweepRun) -> None:
        """Write the file. An error is reported once, because MLflow may continue."""
        self._stale = False
        try:
            with self._pace.kept():
                swept = sweep.plan.swept
                write_results(sweep.folder, swept, results_of(sweep.states, swept, sweep.state.front(), self._run_id))
        except OSError as error:
            if not self._unwritable:
                sweep.log(f"{error.filename} is not up to date: {error.strerror}")
            self._unwritable = True


def results_of(
    states: Sequence[TrialState], swept: Sequence[str], front: Collection[int], run_id: Callable[[int], str]
) -> pd.DataFrame:
    """Return a row for each trial.

    Args:
        states: of the trials, in the order of their numbers.
        swept: the keys that differ between trials.
        front: the trials of the Pareto front, if there are several objectives.
        run_id: returns the id of a trial's run by its number; "": none.
    """
    frame = SweepRecord("", "", [], list(states), 0.0, 0.0).frame()
    columns: dict[str, Any] = {
        **{key: [value_text(setting(state.trial, key)) for state in states] for key in swept},
        "status": frame["status"].replace(TrialStatus.starting, TrialStatus.waiting),  # for its workers
        "pareto": ["yes" if number in front else "" for number in frame.index],
        "seconds": frame["seconds"].round(2),
        "error": [reason_text(state.reason) for state in states],
        "run_id": [run_id(number) for number in frame.index],
        "folder": [str(state.trial.folder) for state in states],
    }
    return frame.assign(**columns)
