"""A sweep with what its report makes of it: the rules that it is judged by, and its answer."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

from fsdp_lab.record.reasons import why_timing_is_excluded
from fsdp_lab.record.sweep import SweepRecord
from fsdp_lab.report.answer import Answer, answer, rules_of
from fsdp_lab.report.settings import Rules


@dataclass(frozen=True)
class SweepData(SweepRecord):
    """A sweep to report on."""

    @property
    def rules(self) -> Rules:
        """How a setting is chosen."""
        return rules_of(self)

    @cached_property
    def recommendation(self) -> Answer:
        """The answer of the report."""
        return answer(self)

    def judged_by(self, others_cpu: float) -> Self:
        """Return the sweep with timings excluded by another `report.others_cpu`."""
        trials = [copy(trial) for trial in self.trials]
        for trial in trials:
            trial.timing_excluded = why_timing_is_excluded(trial.facts, trial.figures, others_cpu)
        return replace(self, others_cpu=others_cpu, trials=trials)
