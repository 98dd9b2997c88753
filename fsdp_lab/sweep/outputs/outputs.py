"""Where a sweep is shown and published: the terminal, `results.csv`, MLflow and the report."""

from __future__ import annotations

import time

from fsdp_lab.record.results_csv import write_results
from fsdp_lab.report.answer import Answer, answer, plain_loop_lines
from fsdp_lab.report.page import FILES, write_report
from fsdp_lab.sweep.explained import explain_shortages
from fsdp_lab.sweep.forecasts import Forecasts
from fsdp_lab.sweep.names import report_command
from fsdp_lab.sweep.outputs.console import Console
from fsdp_lab.sweep.outputs.mlflow import MlflowRuns
from fsdp_lab.sweep.outputs.results_csv import rows_of
from fsdp_lab.sweep.plain_loops import PlainLoops
from fsdp_lab.sweep.record import record_of
from fsdp_lab.sweep.sweep import Sweep
from fsdp_lab.tracking.tags import SweepAnswer

_EVERY_S = 1.0
_SHARE = 0.02  # of the driver's time, at most


class Outputs:
    """Shows each change of a sweep, after its state and its folder have it. Only `opened` may raise.

    Attributes:
        answer: the report's recommendation; None: no report was written.
    """

    def __init__(self, sweep: Sweep) -> None:
        self.sweep = sweep
        self.console = Console(sweep)
        self.mlflow = MlflowRuns(sweep)
        self.plain_loops = PlainLoops(sweep)
        self.forecasts = Forecasts(sweep)  # always last: they may skip a trial
        self.answer: Answer | None = None
        self._stale, self._due_at = False, 0.0

    def log(self, text: str) -> None:
        """Show a message for the user."""
        self.console.log(text)

    def opened(self) -> None:
        """Open MLflow, before anything has started.

        Raises:
            TrackingError: the store cannot be reached.
        """
        self.mlflow.open()
        self.write_results()

    def ready(self) -> None:
        """Wait for forecasts and plain loops, before the first trial starts."""
        self.forecasts.ready()
        if self.sweep.has_more():
            self.plain_loops.ready()

    def ran(self) -> None:
        """Confirm the plain loops, after the last trial."""
        self.plain_loops.confirm()

    def added(self, number: int) -> None:
        """Show that a search has suggested a trial: their number is in the name of the sweep's run."""
        self.mlflow.change(None)
        self.forecasts.added(number)

    def began(self, number: int) -> None:
        """Show the start of a trial; a second one after its process was killed."""
        self.console.began(number)
        self.changed(number)

    def facts(self, number: int) -> None:
        """Show what is known of a trial that is about to take its first step: its device, its data."""
        self.console.facts(number)
        self.changed(number)

    def epoch(self, number: int, metrics: dict[str, float]) -> None:
        self.console.epoch(number, metrics)
        self.changed(number)

    def ended(self, number: int) -> None:
        """Show the end of a trial. An interrupted one has no result yet."""
        self.console.ended(number)
        self.changed(number)
        self.forecasts.ended(number)

    def changed(self, number: int) -> None:
        """Publish a change of a trial: after the event's own line."""
        self.mlflow.changed(number)
        self._stale = True
        self._catch_up()

    def tick(self) -> None:
        """Let time pass: called several times a second while trials run."""
        self._catch_up()
        self.forecasts.tick()

    def _catch_up(self) -> None:
        """Draw the bar and write `results.csv`: rarely with thousands of trials, for which both take long."""
        if (begun := time.monotonic()) < self._due_at:
            return
        self.console.draw()
        if self._stale:
            self.write_results()
        self._rest(begun)

    def write_results(self) -> None:
        """Write `results.csv`. An error is logged once: MLflow continues, and a resume writes the file again."""
        sweep, self._stale, begun = self.sweep, False, time.monotonic()
        self.mlflow.note_ids()
        try:
            write_results(sweep.folder, sweep.swept, rows_of(sweep))
        except OSError as error:
            sweep.log_once(f"{error.filename} is not up to date: {error.strerror}")
        self._rest(begun)

    def _rest(self, begun: float) -> None:
        self._due_at = begun + max(_EVERY_S, (time.monotonic() - begun) / _SHARE)

    def closing(self) -> None:
        """Show that the sweep ends; trials that still run are ended after this."""
        self.console.closing()
        self.write_results()
        self.forecasts.end()

    def closed(self) -> None:
        """Write what needs the end of every trial that ran."""
        if not self.sweep.ends_early:
            explain_shortages(self.sweep)
        self.mlflow.settle()  # first: the table and the report name the runs
        self.console.closed()
        self.write_results()
        if self.sweep.trials and not self.sweep.ends_early:
            if self.sweep.started.multirun:
                self.answer = self.report()
            else:
                for line in plain_loop_lines(answer(record_of(self.sweep))):
                    self.log(line)
        self.mlflow.finish()  # last: it sends the other files

    def report(self) -> Answer | None:
        """Write the report, and its answer to MLflow. An error is logged with the command to try again."""
        sweep = self.sweep
        try:
            for name in FILES:  # of an earlier start: MLflow would get them as this one's
                (sweep.folder / name).unlink(missing_ok=True)
            made = write_report(record_of(sweep), sweep.folder)
            self.mlflow.describe(SweepAnswer(**made.as_data))
        except Exception as error:  # noqa: BLE001 - the results are there, and the report can be written again
            self.log(f"the report could not be written ({error}); to try again: {report_command(sweep.folder)}")
            return None
        return made
