"""The effect of one axis alone: means over the other axes, over equal combinations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from fsdp_lab.metrics import SPEED
from fsdp_lab.report.data import Setting, SweepData, as_number

_PARTS = 5


@dataclass(frozen=True)
class Effect:
    """A value of an axis, and a metric over the settings that have it.

    Attributes:
        value: of the axis.
        mean: of the metric.
        spread: the standard deviation; 0 for one setting.
        count: of settings.
    """

    value: str
    mean: float
    spread: float
    count: int


def effects(sweep: SweepData, axis: str, metric: str) -> list[Effect]:
    """Return the effect of each value of the axis, in the order of the sweep.

    If some combinations have no result, a mean over the rest would compare a value's easy cases with another's hard
    ones. So only combinations of the other axes count in which every value has a result. Without any such combination,
    all count.
    """
    with_result = [s for s in sweep.settings if math.isfinite(s.median(metric))]
    if metric == SPEED:  # without those whose every run shared its cores
        timed = {run.group for run in sweep.runs}
        with_result = [s for s in with_result if sweep.groups[s.name] in timed]
    values = list(dict.fromkeys(s.values[axis] for s in with_result))
    by_others: dict[tuple[str, ...], list[Setting]] = {}
    for setting in with_result:
        others = tuple(value for key, value in setting.values.items() if key != axis)
        by_others.setdefault(others, []).append(setting)
    whole = [s for group in by_others.values() if len(group) == len(values) for s in group]
    return [_effect(value, [s for s in whole or with_result if s.values[axis] == value], metric) for value in values]


def _effect(value: str, settings: Sequence[Setting], metric: str) -> Effect:
    values = [s.median(metric) for s in settings]
    return Effect(value, fmean(values), stdev(values) if len(values) > 1 else 0.0, len(values))


def share_explained(sweep: SweepData, axis: str, values: Mapping[str, float]) -> float:
    """Return how much of the settings' differences the axis explains alone: the adjusted R² of the logarithms.

    It is at least 0. The adjustment removes what many values explain by chance. An axis of many numbers counts by
    fifths of them.

    Args:
        sweep: of the settings.
        axis: one of its axes.
        values: name of a setting -> its figure.
    """
    settings = [s for s in sweep.settings if math.isfinite(values.get(s.name, math.nan))]
    figures = [values[s.name] for s in settings]
    if figures and min(figures) > 0:
        figures = [math.log(figure) for figure in figures]
    groups: dict[object, list[float]] = {}
    for part, figure in zip(_parts([s.values[axis] for s in settings]), figures, strict=True):
        groups.setdefault(part, []).append(figure)
    freedom = len(figures) - len(groups)
    total = _squares(figures)
    if freedom < 1 or total == 0:
        return 0.0
    within = sum(_squares(group) for group in groups.values())
    return max(1 - within / freedom * (len(figures) - 1) / total, 0.0)


def _parts(values: Sequence[str]) -> Sequence[object]:
    """Return the values, or if they are many numbers the fifth that contains each."""
    numbers = [as_number(value) for value in values]
    if None in numbers or len(set(values)) <= _PARTS:
        return values
    ranks = {number: rank for rank, number in enumerate(sorted({n for n in numbers if n is not None}))}
    return [ranks[number] * _PARTS // len(ranks) for number in numbers if number is not None]


def _squares(figures: Sequence[float]) -> float:
    mean = fmean(figures) if figures else 0.0
    return sum((figure - mean) ** 2 for figure in figures)
