"""The data of a report: a sweep's record, and the rules that it is judged by."""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass, replace
from typing import Self

from fsdp_lab.config import SweepConfig
from fsdp_lab.record.reasons import why_timing_is_excluded
from fsdp_lab.record.sweep import SweepRecord
from fsdp_lab.record.trial import TrialRecord
from fsdp_lab.report.settings import Rules


@dataclass(frozen=True)
class SweepData(SweepRecord):
    """A sweep to report on."""

    @property
    def rules(self) -> Rules:
        """How a setting is chosen."""
        trivial = {_guessing_loss(trial.config) for trial in self.trials if trial.config is not None}
        return Rules(
            tuple(self.axes),
            self.loss_tolerance,
            self.speed_tolerance,
            tuple(self.objectives),
            self.repeat_max,
            trivial.pop() if len(trivial) == 1 else None,
        )

    @property
    def unfinished(self) -> int:
        """How many trials have no result yet."""
        return sum(not status.is_result for status in self.statuses)

    def judged_by(self, others_cpu: float) -> Self:
        """Return the sweep with timings excluded by another `report.others_cpu`."""
        trials = [copy(trial) for trial in self.trials]
        for trial in trials:
            trial.timing_excluded = why_timing_is_excluded(trial.facts, trial.figures, others_cpu)
        return replace(self, others_cpu=others_cpu, trials=trials)

    def url(self, trial: TrialRecord) -> str:
        """Return the address of the trial's run; "" if not known."""
        return f"{self.runs_url}/{trial.run_id}" if self.runs_url and trial.run_id else ""


def _guessing_loss(config: SweepConfig) -> float | None:
    """Return the cross entropy of guessing, of our image classifiers; read as data: nothing is imported."""
    classes = config.model.arguments.get("num_classes")
    is_known = config.task.name == "classification" and config.model.is_image_classifier
    return math.log(classes) if is_known and isinstance(classes, int) and classes > 1 else None
