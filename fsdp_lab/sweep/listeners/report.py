"""The report of a sweep, written when it ends."""

from __future__ import annotations

from fsdp_lab.report.answer import Answer
from fsdp_lab.report.write import FILES, write_report
from fsdp_lab.sweep.listeners.mlflow import MlflowRuns
from fsdp_lab.sweep.names import report_command
from fsdp_lab.sweep.runner import Ending, Listener, SweepRun
from fsdp_lab.sweep.sweep_data import sweep_of
from fsdp_lab.tracking.tags import SweepAnswer


class Report(Listener):
    """Writes the report of a sweep that ran to its end, and its answer to MLflow.

    Attributes:
        answer: the recommendation; None: no report was written.
    """

    def __init__(self, runs: MlflowRuns) -> None:
        self._runs = runs
        self.answer: Answer | None = None

    def closed(self, sweep: SweepRun, ending: Ending) -> None:
        """Write the report of a sweep that was not interrupted. An error is logged with the command to try again."""
        plan = sweep.plan
        if not sweep.states or not plan.started.multirun or ending.early:
            return
        try:
            data = sweep_of(
                sweep.states, plan.swept, plan.folder, plan.started, self._runs.run_id, self._runs.parent_id
            )
            for name in FILES:  # of an earlier start: MLflow would get them as this one's
                (plan.folder / name).unlink(missing_ok=True)
            self.answer = write_report(data, plan.folder)
            self._runs.describe(SweepAnswer(**self.answer.as_data))
        except Exception as error:  # noqa: BLE001 - the results are there, and the report can be written again
            sweep.log(f"the report could not be written ({error}); to try again: {report_command(plan.folder)}")
