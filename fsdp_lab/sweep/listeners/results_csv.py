"""`results.csv`: a row a trial, with the latest of each figure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from fsdp_lab.config.convert import value_text
from fsdp_lab.config.status import TrialStatus
from fsdp_lab.record.results_csv import write_results
from fsdp_lab.report.reason_texts import reason_text
from fsdp_lab.sweep.listeners.pace import Pace
from fsdp_lab.sweep.names import setting
from fsdp_lab.sweep.runner import Ending, Listener, SweepRun
from fsdp_lab.sweep.state import TrialState


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
                write_results(sweep.folder, swept, rows_of(sweep.states, swept, sweep.state.front(), self._run_id))
        except OSError as error:
            if not self._unwritable:
                sweep.log(f"{error.filename} is not up to date: {error.strerror}")
            self._unwritable = True


def rows_of(
    states: Sequence[TrialState], swept: Sequence[str], front: Collection[int], run_id: Callable[[int], str]
) -> Iterator[dict[str, Any]]:
    """Yield the row of each trial.

    Args:
        states: of the trials, in the order of their numbers.
        swept: the keys that differ between trials.
        front: the trials of the Pareto front, if there are several objectives.
        run_id: returns the id of a trial's run by its number; "": none.
    """
    for number, state in enumerate(states):
        waits = state.status is TrialStatus.starting  # for its workers
        yield {
            **{key: str(figure).removesuffix(".0") for key, figure in state.figures.items()},
            **{key: value_text(setting(state.trial, key)) for key in swept},
            "trial": number,
            "status": TrialStatus.waiting if waits else state.status,
            "pareto": "yes" if number in front else "",
            "seconds": None if state.seconds is None else round(state.seconds, 2),
            "error": reason_text(state.reason),
            "run_id": run_id(number),
            "folder": state.trial.folder,
        }
