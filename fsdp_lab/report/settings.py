"""The settings in a sweep's frame: its trials, grouped by all axes but repeat and seed. Pure."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from fsdp_lab.config import may_change_speed
from fsdp_lab.config.metrics import MEMORY, SPEED, TRAIN_LOSS, VAL_LOSS, spacing
from fsdp_lab.config.status import TrialStatus
from fsdp_lab.record.trial import words
from fsdp_lab.report.plain_check import PlainCheck
from fsdp_lab.report.self_check import SelfCheck
from fsdp_lab.report.speed import Interval, measured

if TYPE_CHECKING:
    import pandas as pd

# Axes that distinguish attempts at a setting, not settings.
REPEATS = ("repeat", "training.seed")

# The axis of what a resume changed since the start of the sweep: `no`, or `key=value` of each change.
CHANGED = "changed"


@dataclass(frozen=True)
class Rules:
    """How a setting is chosen.

    Attributes:
        axes: the keys that differ between trials; columns of the frame.
        loss_tolerance: a setting qualifies if its loss is within this ratio of the best.
        speed_tolerance: settings within this ratio of the fastest tie.
        objectives: `(metric, "min" or "max")`, the most important first; empty: the fastest.
        trivial_loss: the loss of a model that guesses; None: not known, so learning is not checked.
        predicted: speeds and memory are predictions: losses are not compared, and memory decides among equal speeds.
    """

    axes: Sequence[str]
    loss_tolerance: float = 0.02
    speed_tolerance: float = 0.03
    objectives: Sequence[tuple[str, str]] = ()
    trivial_loss: float | None = None
    predicted: bool = False

    @property
    def by_speed(self) -> bool:
        """Whether speed decides, alone or among other objectives."""
        return not self.objectives or any(metric == SPEED for metric, _ in self.objectives)


class Coded(NamedTuple):
    """A code, and the values that its text in `templates/words.j2` needs."""

    code: str
    values: Mapping[str, Any] = {}


@dataclass(frozen=True, eq=False)
class Setting:
    """The trials that differ only in the attempt: one, or several repeats.

    Attributes:
        values: of each axis, as typed.
        trials: their numbers.
        statuses: how they ended.
        group: the number of its group, in which settings cannot differ in speed.
        pace: the speed of the group; None: it is not compared.
        peak: the median peak memory of the group, which nothing in it changes; infinite without one.
        figures: metric -> its median over the finished trials, for speed the estimate; only what is known.
    """

    values: dict[str, str]
    trials: tuple[int, ...]
    statuses: tuple[TrialStatus, ...]
    group: int
    pace: Any  # Measured or Predicted, the same in all settings of a frame
    peak: float
    figures: Mapping[str, float]

    @property
    def speed(self) -> Interval | None:
        """The samples/s, without an interval if its upper end is infinite; None: it is not compared."""
        speed = self.pace and self.pace.interval
        return Interval(speed.value) if speed and math.isinf(speed.high) else speed

    def times(self, other: Setting) -> Interval:
        """Return how many times as fast as another one it is. Both have a speed."""
        ratio: Interval = self.pace.ratio(other.pace)
        return ratio

    @property
    def name(self) -> str:
        return words(self.values)

    @property
    def is_finished(self) -> bool:
        return TrialStatus.finished in self.statuses

    def apart(self, other: Setting) -> str:
        """Return a name of the other setting: its values that differ from this one's."""
        return words({key: text for key, text in other.values.items() if self.values.get(key) != text})

    def figure(self, metric: str, unknown: float = math.nan) -> float:
        """Return a figure, or `unknown`."""
        return self.figures.get(metric, unknown)

    def rounding(self, other: Setting, metric: str) -> float:
        """Return the largest difference of two figures that may be rounding; see `spacing`."""
        return max(spacing(metric, self.figures), spacing(metric, other.figures))


class Settings:
    """The settings of a frame, in the order of their first trials.

    Args:
        frame: a row for each trial, as in `SweepRecord.frame`. Predictions have a column `predicted`, see `Predicted`.
        check: the comparison of trials that must compute the same.
        plain: their comparison with plain loops.
        reasons: number of a trial -> why it did not finish, in words.

    Attributes:
        axes: those that distinguish settings.
        idle_axes: those that change nothing on this device.
        speed_axes: those of `axes` that may change speed.
        groups: the number of each trial's group, whose settings cannot differ in speed.
    """

    def __init__(
        self,
        frame: pd.DataFrame,
        rules: Rules,
        check: SelfCheck | None = None,
        plain: PlainCheck | None = None,
        reasons: Mapping[int, str] | None = None,
    ) -> None:
        self.frame, self.rules, self.check, self.plain = frame, rules, check or SelfCheck(), plain or PlainCheck()
        self.reasons = reasons or {}
        on_cpu = set(frame["device"]) - {""} == {"cpu"}
        self.idle_axes = [axis for axis in rules.axes if on_cpu and axis.partition(".")[0] == "offload"]
        self.axes = [axis for axis in rules.axes if axis not in (*REPEATS, *self.idle_axes)]
        self.speed_axes = [axis for axis in self.axes if may_change_speed(axis)]
        self.groups = combinations(frame, self.speed_axes)
        self.all = self._settings()

    def _settings(self) -> list[Setting]:
        finished = self.frame.select_dtypes("number").replace([math.inf, -math.inf], math.nan)
        finished = finished[self.frame["status"] == TrialStatus.finished]
        places, paces = combinations(self.frame, self.axes), self._paces()
        medians = finished.groupby(places).median().to_dict("index")
        peaks = column(finished, MEMORY).groupby(self.groups).median().fillna(math.inf)
        settings = []
        for place, rows in self.frame.groupby(places):
            group = int(self.groups[rows.index[0]])
            pace = paces.get(group)
            known = {key: median for key, median in medians.get(place, {}).items() if not math.isnan(median)}
            known.pop(SPEED, None)  # the estimate of the group replaces it
            settings.append(
                Setting(
                    rows.iloc[0][self.axes].to_dict(),
                    tuple(rows.index),
                    tuple(map(TrialStatus, rows["status"])),
                    group,
                    pace,
                    peaks.get(group, math.inf),
                    {**known, SPEED: pace.interval.value} if pace else known,
                )
            )
        return settings

    def _paces(self) -> dict[int, Any]:
        """Return the speed of each group that has one."""
        if self.rules.predicted:
            return self.frame["predicted"].dropna().groupby(self.groups).first().to_dict()
        speeds = column(self.compared, SPEED), self.rounds[self.compared.index]
        return measured(*(of.groupby(self.groups).apply(list).to_dict() for of in speeds))

    def without(self, names: Container[str]) -> list[Setting]:
        """Return the settings, without those of these names."""
        return [setting for setting in self.all if setting.name not in names]

    @cached_property
    def of_trial(self) -> dict[int, Setting]:
        return {number: setting for setting in self.all for number in setting.trials}

    def alike(self, setting: Setting) -> list[Setting]:
        """Return the settings that were found to compute the same as one, that one first."""
        groups = [group for group in self.check.agreeing if not set(setting.trials).isdisjoint(group)]
        others = [self.of_trial[number] for group in groups for number in group]
        return list(dict.fromkeys([setting, *others]))

    @cached_property
    def loss_key(self) -> str:
        return loss_metric(self.frame)

    @cached_property
    def rounds(self) -> pd.Series[int]:
        """The number of the round in which each trial ran."""
        return combinations(self.frame, [axis for axis in REPEATS if axis in self.rules.axes])

    def runs(self, setting: Setting, metric: str) -> dict[int, float]:
        """Return a figure of each finished trial of a setting."""
        rows = self.frame.loc[list(setting.trials)]
        return column(rows[rows["status"] == TrialStatus.finished], metric).dropna().to_dict()

    @property
    def pooled_axes(self) -> list[str]:
        """The axes that cannot change the speed: trials that differ in nothing else are runs of one speed."""
        return [axis for axis in self.rules.axes if axis not in self.speed_axes]

    @property
    def repeated(self) -> list[int]:
        """The trials that show how much two runs of one speed differ."""
        groups = self.groups[self.compared.index]
        return list(groups.index[groups.groupby(groups).transform("size") > 1])

    @cached_property
    def compared(self) -> pd.DataFrame:
        """The trials whose speeds are compared: timed, and finished or stopped early."""
        speeds, status = column(self.frame, SPEED), self.frame["status"]
        has_ended = status.isin([TrialStatus.finished, TrialStatus.stopped])
        return self.frame[has_ended & (speeds > 0) & (speeds < math.inf)]


def combinations(frame: pd.DataFrame, axes: Sequence[str]) -> pd.Series[int]:
    """Return for each row of a frame the number of its values of the axes, in the order of their first rows."""
    import pandas as pd

    return frame.groupby(list(axes), sort=False).ngroup() if axes else pd.Series(0, frame.index)


def column(frame: pd.DataFrame, metric: str) -> pd.Series[float]:
    """Return the column of a metric, with NaN where a trial has none."""
    import pandas as pd

    return frame[metric] if metric in frame else pd.Series(math.nan, frame.index)


def loss_metric(frame: pd.DataFrame) -> str:
    """Return the metric of learning in a sweep's frame: the validation loss if there is one, else the training loss."""
    return VAL_LOSS if column(frame, VAL_LOSS).notna().any() else TRAIN_LOSS
