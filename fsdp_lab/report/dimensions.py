"""The two directions of the report's main picture, and the positions of settings and runs in it. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fsdp_lab.metrics import MEMORY, MIB, SPEED, declared
from fsdp_lab.report.choice import value
from fsdp_lab.report.data import Setting, SweepData, TrialRow, as_number
from fsdp_lab.report.speed import Speeds
from fsdp_lab.report.style import coloring, is_numeric
from fsdp_lab.status import TrialStatus

_LISTED = 4  # values of an axis of numbers that may be a list
_SAME = 1e-3  # figures that differ by less than this ratio are one


@dataclass(frozen=True)
class Dimension:
    """One direction of the picture.

    Attributes:
        key: of a metric, or of an axis of the sweep.
        title: for people.
        better: "min" or "max" of a metric; "" for an axis.
        scale: the divisor of a metric's values.
        kind: of the scale that is drawn: `linear` or `log`.
        words: the values of an axis without numbers, at positions 0, 1, 2 ...
    """

    key: str
    title: str
    better: str = ""
    scale: float = 1.0
    kind: str = "linear"
    words: tuple[str, ...] = ()

    def place(self, values: Mapping[str, str], figures: Mapping[str, float]) -> float | None:
        """Return the position of a setting or trial; None if it lacks the figure."""
        if not self.better:
            return float(self.words.index(values[self.key])) if self.words else as_number(values[self.key])
        figure = figures.get(self.key, math.nan)
        return figure / self.scale if math.isfinite(figure) else None


@dataclass(frozen=True)
class Point:
    """A setting, or a run of one, and its place."""

    setting: Setting
    x: float
    y: float
    trial: TrialRow | None = None


def dimensions(sweep: SweepData, axes: Sequence[tuple[str, str]]) -> tuple[Dimension, Dimension] | None:
    """Return x and y: the first two metrics of the answer; None if nothing can be compared.

    A metric that is the same everywhere is replaced by the axis that explains most of the other metric.
    """
    speeds = Speeds(sweep.runs)
    metrics = [_metric(sweep, *axis) for axis in axes[:2]]
    differing = [d for d in metrics if _differs(_all_figures(sweep, speeds, d.key))]
    if len(differing) == 2:
        return differing[0], differing[1]
    if not differing or not sweep.setting_axes:
        return None
    by = {s.name: value(sweep, speeds, s, differing[0].key) for s in sweep.settings}
    return _axis(sweep, _sampled(sweep) or coloring(sweep, [by]).axis or sweep.setting_axes[0]), differing[0]


def _sampled(sweep: SweepData) -> str | None:
    """Return the numeric axis with the most values, if they are too many to be listed: a search has drawn them."""
    counts = {axis: len({s.values[axis] for s in sweep.settings}) for axis in sweep.setting_axes}
    numbers = {axis: n for axis, n in counts.items() if n > _LISTED and is_numeric(sweep, axis)}
    return max(numbers, key=numbers.__getitem__, default=None)


def setting_points(sweep: SweepData, x: Dimension, y: Dimension) -> list[Point]:
    """Return the settings that have both figures, each at its estimate."""
    speeds = Speeds(sweep.runs)
    keys = [dimension.key for dimension in (x, y) if dimension.better]
    placed = [
        _point(setting, None, x, y, {key: value(sweep, speeds, setting, key) for key in keys})
        for setting in sweep.settings
    ]
    return [point for point in placed if point is not None]


def run_points(sweep: SweepData, x: Dimension, y: Dimension) -> list[Point]:
    """Return the runs that finished or were stopped, each as measured."""
    ended = (TrialStatus.finished, TrialStatus.stopped)
    runs = [(setting, trial) for setting in sweep.settings for trial in setting.trials if trial.status in ended]
    placed = [_point(setting, trial, x, y, trial.figures) for setting, trial in runs]
    return [point for point in placed if point is not None]


def _point(
    setting: Setting, trial: TrialRow | None, x: Dimension, y: Dimension, figures: Mapping[str, float]
) -> Point | None:
    at_x, at_y = x.place(setting.values, figures), y.place(setting.values, figures)
    return None if at_x is None or at_y is None else Point(setting, at_x, at_y, trial)


def _metric(sweep: SweepData, key: str, better: str) -> Dimension:
    metric = declared(key)
    if key != MEMORY:
        return Dimension(key, metric.label, better, metric.scale)
    most = max((trial.figures.get(MEMORY, 0.0) for trial in sweep.trials), default=0.0)
    unit, scale = ("GiB", MIB * 1024) if most >= 1000 * MIB else ("MiB", MIB)
    return Dimension(key, f"peak memory of a worker, {unit}", better, scale)


def _axis(sweep: SweepData, axis: str) -> Dimension:
    if not is_numeric(sweep, axis):
        return Dimension(axis, axis, words=tuple(dict.fromkeys(s.values[axis] for s in sweep.settings)))
    above_0 = all((as_number(s.values[axis]) or 0.0) > 0 for s in sweep.settings)
    return Dimension(axis, axis, kind="log" if axis in sweep.log_axes and above_0 else "linear")


def _all_figures(sweep: SweepData, speeds: Speeds, key: str) -> list[float]:
    """Return the figures of settings and of drawn runs, without speeds that do not count."""
    ended = (TrialStatus.finished, TrialStatus.stopped)
    runs = [t for t in sweep.trials if t.status in ended and not (key == SPEED and sweep.shared(t))]
    figures = [value(sweep, speeds, setting, key) for setting in sweep.settings]
    figures += [trial.figures.get(key, math.nan) for trial in runs]
    return [figure for figure in figures if math.isfinite(figure)]


def _differs(figures: Sequence[float]) -> bool:
    return len(figures) > 1 and max(figures) - min(figures) > _SAME * max(abs(figure) for figure in figures)
