"""The data of a report: a sweep's trials as they ended, in plain values, wherever they were read from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from fsdp_lab.config import may_change_speed
from fsdp_lab.metrics import MEMORY, OTHERS_CPU, SPEED, TRAIN_LOSS, VAL_LOSS
from fsdp_lab.record.sweep import SweepRecord
from fsdp_lab.record.trial import TrialRecord as TrialRow
from fsdp_lab.record.trial import words
from fsdp_lab.report.speed import Run
from fsdp_lab.status import TrialStatus

# Axes that distinguish attempts at a setting, not settings.
REPEATS = ("repeat", "training.seed")


@dataclass(frozen=True)
class Setting:
    """The trials that differ only in the attempt: one, or several repeats."""

    values: dict[str, str]
    trials: list[TrialRow]

    @property
    def name(self) -> str:
        """The values as typed."""
        return words(self.values)

    @property
    def finished(self) -> list[TrialRow]:
        """The trials that finished."""
        return [trial for trial in self.trials if trial.status == TrialStatus.finished]

    def of(self, key: str) -> list[float]:
        """Return the values of a metric in the finished trials that have it."""
        return [trial.figures[key] for trial in self.finished if math.isfinite(trial.figures.get(key, math.nan))]

    def median(self, key: str) -> float:
        """Return the median over the finished trials; NaN if none has the metric."""
        return median(self.of(key)) if self.of(key) else math.nan


@dataclass(frozen=True)
class SweepData(SweepRecord):
    """A sweep to report on."""

    @property
    def setting_axes(self) -> list[str]:
        """The axes that make a setting: all except repeats and axes that change nothing."""
        return [axis for axis in self.axes if axis not in REPEATS and axis not in self.idle_axes]

    @cached_property
    def idle_axes(self) -> list[str]:
        """The axes whose values make no difference: offload, if all trials ran on a CPU."""
        on_cpu = {trial.device for trial in self.trials if trial.device} == {"cpu"}
        return [axis for axis in self.axes if axis.partition(".")[0] == "offload"] if on_cpu else []

    @cached_property
    def speed_axes(self) -> list[str]:
        """The axes of a setting whose values may differ in speed or peak memory; `init` and the like do not."""
        return [axis for axis in self.setting_axes if may_change_speed(axis)]

    def shared(self, trial: TrialRow) -> bool:
        """Return whether the trial ran on a CPU whose cores other processes used too."""
        return trial.device == "cpu" and trial.figures.get(OTHERS_CPU, 0.0) > self.others_cpu

    @cached_property
    def groups(self) -> dict[str, int]:
        """Setting, by name -> the group of settings that cannot differ in speed."""
        known: dict[tuple[str, ...], int] = {}
        return {
            setting.name: known.setdefault(tuple(setting.values[axis] for axis in self.speed_axes), len(known))
            for setting in self.settings
        }

    @cached_property
    def peaks(self) -> dict[int, float]:
        """Group of settings -> the median of their peak memories, which nothing in it changes; NaN without one."""
        by_group: dict[int, list[float]] = {}
        for setting in self.settings:
            by_group.setdefault(self.groups[setting.name], []).extend(setting.of(MEMORY))
        return {group: median(peaks) if peaks else math.nan for group, peaks in by_group.items()}

    @property
    def timed(self) -> bool:
        """Whether any trial's steps were timed, whether its speed counts or not."""
        return any(_has_speed(trial) for trial in self.trials)

    @cached_property
    def runs(self) -> list[Run]:
        """The runs whose speed counts: timed, finished or stopped early, on cores that other processes did not use."""
        rounds: dict[tuple[str, ...], int] = {}
        for trial in self.trials:
            rounds.setdefault(tuple(trial.setting.get(axis, "") for axis in REPEATS), len(rounds))
        return [
            Run(
                self.groups[setting.name],
                rounds[tuple(trial.setting.get(axis, "") for axis in REPEATS)],
                trial.figures[SPEED],
                trial.figures.get("perf/speed_error"),
                int(trial.figures.get("perf/timed_steps", 0)),
            )
            for setting in self.settings
            for trial in setting.trials
            if trial.status in (TrialStatus.finished, TrialStatus.stopped)
            and _has_speed(trial)
            and not self.shared(trial)
        ]

    @property
    def unfinished(self) -> int:
        """How many trials have no result yet."""
        return sum(not status.is_result for status in self.statuses)

    @cached_property
    def settings(self) -> list[Setting]:
        """In the order of their first trials."""
        settings: dict[tuple[str, ...], Setting] = {}
        for trial in self.trials:
            values = {axis: trial.setting.get(axis, "") for axis in self.setting_axes}
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


def _has_speed(trial: TrialRow) -> bool:
    return 0 < trial.figures.get(SPEED, 0.0) < math.inf
