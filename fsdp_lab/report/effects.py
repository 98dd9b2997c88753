"""What one axis does alone: means over the other axes, like compared with like."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from fsdp_lab.report.data import Setting, Sweep


@dataclass(frozen=True)
class Effect:
    """A value of an axis: the mean of a metric over the settings that have it, their standard deviation (0 of one) and
    number."""

    value: str
    mean: float
    spread: float
    count: int


def effects(sweep: Sweep, axis: str, metric: str) -> list[Effect]:
    """One for each value of the axis, in the order of the sweep.

    Where some combinations have no result, a mean over what is left would compare a value's easy cases with another's
    hard ones. So only those combinations of the other axes count in which every value has a result; where there is
    none such, all count.
    """
    with_result = [s for s in sweep.settings if math.isfinite(s.median(metric))]
    values = list(dict.fromkeys(s.values[axis] for s in with_result))
    by_others: dict[tuple[str, ...], list[Setting]] = {}
    for setting in with_result:
        others = tuple(value for key, value in setting.values.items() if key != axis)
        by_others.setdefault(others, []).append(setting)
    whole = [s for group in by_others.values() if len(group) == len(values) for s in group]
    return [_effect(value, [s for s in whole or with_result if s.values[axis] == value], metric) for value in values]


def _effect(value: str, settings: Sequence[Setting], metric: str) -> Effect:
    found = [s.median(metric) for s in settings]
    return Effect(value, fmean(found), stdev(found) if len(found) > 1 else 0.0, len(found))
