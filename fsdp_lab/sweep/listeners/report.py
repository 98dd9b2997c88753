"""The report of a sweep, written when it ends."""

from __future__ import annotations

import shlex

from fsdp_lab.report.answer import Answer
from fsdp_lab.report.uses import USE_FILES
from fsdp_lab.report.write import FILES, write_report
from fsdp_lab.sweep.listeners.mlflow import MlflowRuns
from fsdp_lab.sweep.names import relative
from fsdp_lab.sweep.report import sweep_of
from fsdp_lab.sweep.runner import Ending, Listener, SweepRun


class Report(Listener):
    """Writes `report.html`, `.md` and `.csv` of a sweep that ran to its end, and its answer into MLflow.

    `answer`: what it recommends.
    """

    def __init__(self, runs: MlflowRuns) -> None:
        self._runs = runs
        self.answer: Answer | None = None

    def closed(self, sweep: SweepRun, ending: Ending) -> None:
        if ending.early or not sweep.plan.record.multirun:
            return
        plan = sweep.plan
        for name in (*FILES, *USE_FILES):  # of an earlier start: MLflow would get them as this one's
            (plan.folder / name).unlink(missing_ok=True)
        try:
            found = sweep_of(
                sweep.states, plan.swept, plan.folder, plan.record, self._runs.run_id, self._runs.parent_id
            )
            self.answer = write_report(found, plan.folder)
            self._runs.describe(self.answer.head + self.answer.sentence)
        except Exception as error:  # noqa: BLE001 - the results are there, and the report can be written again
            again = f"python -m fsdp_lab.report sweep={shlex.quote(str(relative(plan.folder)))}"
            sweep.say(f"the report could not be written ({error}); to try again: {again}")
