"""`results.csv`: a row a trial, with the latest of each figure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from fsdp_lab.config.convert import value_text
from fsdp_lab.config.status import TrialStatus
from fsdp_lab.record.results_csv import write_results
from fsdp_lab.report.plain_check import check_against_plain
from fsdp_lab.report.render import reason_text
from fsdp_lab.sweep.names import setting
from fsdp_lab.sweep.outputs.pace import Pace
from fsdp_lab.sweep.sweep import Sweep


class ResultsCsv:
    """Keeps the file up to date, at most a second late, or with thousands of trials some: a resume makes it anew.

    Attributes:
        stale: something has changed since it was written.
    """

    def __init__(self, sweep: Sweep, run_id: Callable[[int | None], str]) -> None:
        self._sweep, self._run_id = sweep, run_id
        self._pace, self.stale = Pace(), False

    def update(self) -> None:
        if self.stale and self._pace.is_due:
            self.write()

    def write(self) -> None:
        """Write the file. An error is reported once, because MLflow may continue."""
        sweep, self.stale = self._sweep, False
        try:
            with self._pace.kept():
                write_results(sweep.folder, sweep.swept, rows_of(sweep, self._run_id))
        except OSError as error:
            sweep.log_once(f"{error.filename} is not up to date: {error.strerror}")


def rows_of(sweep: Sweep, run_id: Callable[[int], str]) -> Iterator[dict[str, Any]]:
    """Yield the row of each trial. `run_id`: returns the id of a trial's run by its number; "": none."""
    front, plain = sweep.front(), check_against_plain(sweep.trials, sweep.plain_loops)
    for number, state in enumerate(sweep.trials):
        waits = state.status is TrialStatus.starting  # for its workers
        yield {
            **{key: str(figure).removesuffix(".0") for key, figure in state.figures.items()},
            **{key: value_text(setting(state.trial, key)) for key in sweep.swept},
            "trial": number,
            "status": TrialStatus.waiting if waits else state.status,
            "plain_loop": "differs" if number in plain.different else "agrees" if number in plain.agreeing else "",
            "note": " ".join([*(f"Resumed with {word}." for word in state.trial.changed), *state.notes]),
            "pareto": "yes" if number in front else "",
            "seconds": None if state.seconds is None else round(state.seconds, 2),
            "error": reason_text(state.reason),
            "run_id": run_id(number),
            "folder": state.trial.folder,
        }
