"""The data of a report: a sweep's record, the rules that it is judged by, and its trials by setting."""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import Self

from fsdp_lab.config.workload import ModelConfig
from fsdp_lab.metrics import TRAIN_LOSS, VAL_LOSS
from fsdp_lab.record.sweep import SweepRecord
from fsdp_lab.record.trial import TrialRecord as TrialRow
from fsdp_lab.record.trial import why_timing_is_excluded, words
from fsdp_lab.report.settings import REPEATS, Rules
from fsdp_lab.status import TrialStatus


@dataclass(frozen=True)
class Setting:
    """The trials that differ only in the attempt, as the nights compare them."""

    values: dict[str, str]
    trials: list[TrialRow]

    @property
    def name(self) -> str:
        """The values as typed."""
        return words(self.values)

    def of(self, key: str) -> list[float]:
        """Return the values of a metric in the finished trials that have it."""
        finished = [trial.figures for trial in self.trials if trial.status == TrialStatus.finished]
        return [figures[key] for figures in finished if math.isfinite(figures.get(key, math.nan))]

    def median(self, key: str) -> float:
        """Return the median over the finished trials; NaN if none has the metric."""
        return median(self.of(key)) if self.of(key) else math.nan


@dataclass(frozen=True)
class SweepData(SweepRecord):
    """A sweep to report on."""

    @property
    def rules(self) -> Rules:
        """How a setting is chosen."""
        return Rules(
            tuple(self.axes),
            self.loss_tolerance,
            self.speed_tolerance,
            tuple(self.objectives),
            self.repeat_max,
            self._trivial_loss,
        )

    @property
    def _trivial_loss(self) -> float | None:
        """The cross entropy of guessing among the classes of our image models; None: not known."""
        models = [trial.config.model for trial in self.trials if trial.config is not None]
        classes = {model.num_classes for model in models if isinstance(model, ModelConfig)}
        return math.log(classes.pop()) if len(classes) == 1 else None

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

    @cached_property
    def settings(self) -> list[Setting]:
        """In the order of their first trials."""
        on_cpu = {trial.device for trial in self.trials if trial.device} == {"cpu"}
        axes = [a for a in self.axes if a not in REPEATS and not (on_cpu and a.partition(".")[0] == "offload")]
        settings: dict[tuple[str, ...], Setting] = {}
        for trial in self.trials:
            values = {axis: trial.setting.get(axis, "") for axis in axes}
            settings.setdefault(tuple(values.values()), Setting(values, [])).trials.append(trial)
        return list(settings.values())

    @cached_property
    def loss_key(self) -> str:
        """The metric of learning: the validation loss if there is one, else the training loss."""
        return VAL_LOSS if any(VAL_LOSS in trial.figures for trial in self.trials) else TRAIN_LOSS

    def url(self, trial: TrialRow) -> str:
        """Return the address of the trial's run; "" if not known."""
        return f"{self.runs_url}/{trial.run_id}" if self.runs_url and trial.run_id else ""


def as_number(text: str) -> float | None:
    """Return the number in a value of an axis; None for a word."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
