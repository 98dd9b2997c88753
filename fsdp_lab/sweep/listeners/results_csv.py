"""`results.csv`: a row a trial, with the latest of each figure."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from fsdp_lab.config.convert import value_text
from fsdp_lab.files import write_text
from fsdp_lab.metrics import table_columns
from fsdp_lab.report.reason_texts import reason_text
from fsdp_lab.status import TrialStatus
from fsdp_lab.sweep.listeners.pace import Pace
from fsdp_lab.sweep.names import setting
from fsdp_lab.sweep.runner import Ending, Listener, SweepRun
from fsdp_lab.sweep.state import TrialState


class ResultsCsv(Listener):
    """Keeps the file up to date, at most a second late, or with thousands of trials some: a resume makes it anew.

    Args:
        run_id: the id of a trial's MLflow run, by its number.
    """

    def __init__(self, run_id: Callable[[int], str]) -> None:
        self._run_id = run_id
        self._pace, self._stale, self._unwritable = Pace(), False, False

    def opened(self, sweep: SweepRun) -> None:
        """Write the file."""
        self._write(sweep)

    def changed(self, sweep: SweepRun, number: int) -> None:
        """Update the file, at a limited rate."""
        self._stale = True
        self.tick(sweep)

    def tick(self, sweep: SweepRun) -> None:
        """Update a stale file, at a limited rate."""
        if self._stale and self._pace.is_due:
            self._write(sweep)

    def closing(self, sweep: SweepRun, ending: Ending) -> None:
        """Write the file."""
        self._write(sweep)

    def closed(self, sweep: SweepRun, ending: Ending) -> None:
        """Write the file."""
        self._write(sweep)

    def _write(self, sweep: SweepRun) -> None:
        """Write the file. A full disk is reported once, because MLflow may lie on another disk and continue."""
        self._stale = False
        path = sweep.folder / "results.csv"
        if not sweep.folder.is_dir():  # the sweep says so, and ends
            return
        try:
            with self._pace.kept():
                write_results(path, sweep.states, sweep.plan.swept, sweep.state.front(), self._run_id)
        except OSError as error:
            if not self._unwritable:
                sweep.log(f"{path} is not up to date: {error.strerror}; free the disk")
            self._unwritable = True


def write_results(
    path: Path,
    states: Sequence[TrialState],
    swept: Sequence[str],
    front: Collection[int] = (),
    run_id: Callable[[int], str] = lambda number: "",
) -> None:
    """Write the table under a temporary name first.

    Args:
        path: of the CSV file.
        states: of the trials, in the order of their numbers.
        swept: the keys that differ between trials.
        front: the trials of the Pareto front, if there are several objectives.
        run_id: returns the id of a trial's run by its number; "": none.
    """
    measured = [column.key for column in table_columns("csv")]
    text = io.StringIO(newline="")
    rows = csv.writer(text)
    rows.writerow(
        ["trial", "status", *swept, *measured, "pareto", "seconds", "error", "run_id", "folder", "timing_excluded"]
    )
    for number, state in enumerate(states):
        figures = state.figures
        rows.writerow(
            [
                number,
                shown(state.status),
                *(value_text(setting(state.trial, key)) for key in swept),
                *(figures.get(key, "") for key in measured),
                "yes" if number in front else "",
                "" if state.seconds is None else round(state.seconds, 2),
                reason_text(state.reason),
                run_id(number),
                state.trial.folder,
                state.timing_excluded or "",
            ]
        )
    write_text(path, text.getvalue(), parents=False)


def shown(status: TrialStatus) -> TrialStatus:
    """Return the status for people: a trial that waits for its workers is still waiting."""
    return TrialStatus.waiting if status is TrialStatus.starting else status
