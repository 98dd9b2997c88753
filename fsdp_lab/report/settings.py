"""The settings in a sweep's frame: its trials, without what distinguishes attempts at one setting. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fsdp_lab.config import may_change_speed
from fsdp_lab.metrics import LOSS_EPS, MEMORY, PREDICTED_SPEED, RATIO_ERROR, RATIO_GROUP, SPEED, TRAIN_LOSS, VAL_LOSS
from fsdp_lab.record.trial import words
from fsdp_lab.report.predicted import Predicted, PredictedSpeeds
from fsdp_lab.report.speed import SIGNIFICANCE, Run, Speeds, level_of
from fsdp_lab.status import TrialStatus

if TYPE_CHECKING:
    import pandas as pd

# Axes that distinguish attempts at a setting, not settings.
REPEATS = ("repeat", "training.seed")
LOSSES = (TRAIN_LOSS, VAL_LOSS)


@dataclass(frozen=True)
class Rules:
    """How a setting is chosen.

    Attributes:
        axes: the keys that differ between trials; columns of the frame.
        loss_tolerance: a setting qualifies if its loss is within this ratio of the best.
        speed_tolerance: settings within this ratio of the fastest tie.
        objectives: `(metric, "min" or "max")`, the most important first; empty: the fastest.
        repeat_max: the most rounds of `repeat=auto`; None: repeats were typed.
        trivial_loss: the loss of a model that guesses; None: not known, so nothing is said of learning.
        predicted: speeds and memory are predictions: losses are not compared, and memory decides among equal speeds.
    """

    axes: Sequence[str]
    loss_tolerance: float = 0.02
    speed_tolerance: float = 0.03
    objectives: Sequence[tuple[str, str]] = ()
    repeat_max: int | None = None
    trivial_loss: float | None = None
    predicted: bool = False

    @property
    def by_speed(self) -> bool:
        """Whether speed decides, alone or among other objectives."""
        return not self.objectives or any(metric == SPEED for metric, _ in self.objectives)


@dataclass(frozen=True, eq=False)
class Setting:
    """The trials that differ only in the attempt: one, or several repeats.

    Attributes:
        values: of each axis, as typed.
        trials: their numbers.
        group: of the settings that cannot differ in speed.
    """

    values: dict[str, str]
    trials: tuple[int, ...]
    group: int

    @property
    def name(self) -> str:
        """The values as typed."""
        return words(self.values)

    def apart(self, other: Setting) -> str:
        """Return the other setting by the values that differ from this one's."""
        return words({key: text for key, text in other.values.items() if self.values.get(key) != text})


class Settings:
    """The settings of a frame, in the order of their first trials.

    Args:
        frame: a row a trial, as of `SweepRecord.frame`.
        rules: name its axes.
    """

    def __init__(self, frame: pd.DataFrame, rules: Rules) -> None:
        self.frame, self.rules = frame, rules
        on_cpu = set(frame["device"]) - {""} == {"cpu"}
        self.idle_axes = [axis for axis in rules.axes if on_cpu and axis.partition(".")[0] == "offload"]
        self.axes = [axis for axis in rules.axes if axis not in (*REPEATS, *self.idle_axes)]
        self.speed_axes = [axis for axis in self.axes if may_change_speed(axis)]
        groups = combinations(frame, self.speed_axes)
        self.all = [
            Setting({axis: frame.at[numbers[0], axis] for axis in self.axes}, tuple(numbers), int(groups[numbers[0]]))
            for numbers in frame.groupby(combinations(frame, self.axes)).groups.values()
        ]
        self.of_trial = {number: setting for setting in self.all for number in setting.trials}
        self.speeds: Speeds | PredictedSpeeds = self._predicted() if rules.predicted else self._measured()

    @property
    def rounds(self) -> pd.Series[int]:
        """The round of each trial: trials of one round have the same repeat number and seed."""
        return combinations(self.frame, [axis for axis in REPEATS if axis in self.frame])

    @cached_property
    def statuses(self) -> dict[int, TrialStatus]:
        """Trial -> how it ended."""
        return dict(zip(self.frame.index, map(TrialStatus, self.frame["status"]), strict=True))

    @cached_property
    def excluded(self) -> set[int]:
        """The trials whose timing is excluded."""
        return set(self.frame.index[self.frame["timing_excluded"].notna()])

    @cached_property
    def loss_key(self) -> str:
        """The metric of learning."""
        return loss_metric(self.frame)

    def is_finished(self, setting: Setting) -> bool:
        """Whether a trial of the setting finished."""
        return any(self.statuses[number] is TrialStatus.finished for number in setting.trials)

    def figure(self, number: int, key: str) -> float:
        """Return a trial's figure; NaN without one."""
        return float(self.frame.at[number, key]) if key in self.frame else math.nan

    @cached_property
    def _medians(self) -> dict[str, dict[str, float]]:
        numbers = self.frame.select_dtypes("number").replace([math.inf, -math.inf], math.nan)
        finished = numbers[self.frame["status"] == TrialStatus.finished]
        medians: dict[str, dict[str, float]] = (
            finished.groupby([self.of_trial[number].name for number in finished.index]).median().to_dict("index")
            if len(finished)
            else {}
        )
        return medians

    def median(self, setting: Setting, key: str) -> float:
        """Return the median of a metric over the finished trials; NaN if none has it."""
        return self._medians.get(setting.name, {}).get(key, math.nan)

    def value(self, setting: Setting, metric: str) -> float:
        """Return a setting's figure: for speed the estimate, else the median; NaN without one."""
        if metric != SPEED:
            return self.median(setting, metric)
        return self.speeds.estimate(setting.group) if self.speeds.has(setting.group) else math.nan

    def _measured(self) -> Speeds:
        """Return the speeds of the runs, with ratios judged at the significance of each look of `repeat=auto`.

        There is a look after each round. The first shows no noise, unless several of its runs share one speed.
        """
        if self.rules.repeat_max is None:
            return Speeds(self.runs, SIGNIFICANCE)
        first = min((run.round for run in self.runs), default=0)
        groups = [run.group for run in self.runs if run.round == first]
        return Speeds(self.runs, level_of(self.rules.repeat_max - (len(set(groups)) == len(groups))))

    def _predicted(self) -> PredictedSpeeds:
        by_group: dict[int, Predicted] = {}
        for number, setting in self.of_trial.items():
            speed, low, high, error = (
                self.figure(number, key)
                for key in (PREDICTED_SPEED, f"{PREDICTED_SPEED}_low", f"{PREDICTED_SPEED}_high", RATIO_ERROR)
            )
            if speed > 0:
                group = str(self.frame.at[number, RATIO_GROUP])
                relative = error if math.isfinite(error) else None
                by_group.setdefault(setting.group, Predicted(speed, low, high, relative, group))
        return PredictedSpeeds(by_group)

    @cached_property
    def peaks(self) -> dict[int, float]:
        """Group of settings -> the median of its peak memories, which nothing in it changes; infinite without one."""
        import pandas as pd

        table = pd.DataFrame({"group": s.group, "peak": self.median(s, MEMORY)} for s in self.all)
        peaks: dict[int, float] = table.groupby("group")["peak"].median().fillna(math.inf).to_dict()
        return peaks

    @cached_property
    def timed(self) -> dict[int, float]:
        """Trial -> its speed, of those whose steps were timed, whether the timing is excluded or not."""
        figures = {number: self.figure(number, SPEED) for number in self.frame.index}
        return {number: speed for number, speed in figures.items() if 0 < speed < math.inf}

    @cached_property
    def runs(self) -> list[Run]:
        """The runs that are compared: timed, finished or stopped early, and not excluded."""
        rounds = self.rounds
        errors = {number: self.figure(number, "perf/speed_error") for number in self.timed}
        return [
            Run(
                self.of_trial[number].group,
                int(rounds[number]),
                speed,
                errors[number] if math.isfinite(errors[number]) else None,
            )
            for number, speed in self.timed.items()
            if number not in self.excluded and self.statuses[number] in (TrialStatus.finished, TrialStatus.stopped)
        ]

    def rounding(self, one: Setting, other: Setting, metric: str) -> float:
        """Return the difference of two losses that the rounding of a narrow type explains; 0 for other metrics."""
        return max(self.spacing(one, metric), self.spacing(other, metric))

    def spacing(self, setting: Setting, metric: str) -> float:
        """Return the distance of neighbouring values around a loss, at most: they are closest above a power of two."""
        share = abs(self.median(setting, metric)) * self.median(setting, LOSS_EPS) if metric in LOSSES else 0.0
        return share if math.isfinite(share) else 0.0


def combinations(frame: pd.DataFrame, axes: Sequence[str]) -> pd.Series[int]:
    """Return for each row of a frame the number of its values of the axes, in the order of their first rows."""
    import pandas as pd

    return frame.groupby(list(axes), sort=False).ngroup() if axes else pd.Series(0, frame.index)


def loss_metric(frame: pd.DataFrame) -> str:
    """Return the metric of learning in a sweep's frame: the validation loss if there is one, else the training loss."""
    return VAL_LOSS if VAL_LOSS in frame and frame[VAL_LOSS].notna().any() else TRAIN_LOSS


def or_inf(number: Any) -> float:
    """Return the number, or infinity for one that is not finite."""
    return float(number) if math.isfinite(number) else math.inf
