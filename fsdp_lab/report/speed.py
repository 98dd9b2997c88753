"""The uncertainty of speeds: an interval for each group of runs, and for the ratio of two. Pure.

Noise is a factor on a speed, so all computation is in logarithms, with one variance in all groups. A group's interval
is Student's. The intervals of all ratios of a sweep hold together with the stated confidence: they are Tukey's with
Kramer's standard errors (Kramer, "Extension of multiple range tests to group means with unequal numbers of
replications", Biometrics 12, 1956). So the fastest of many is not called so for being the luckiest.

`scipy.stats.tukey_hsd` gives the same intervals. It refuses groups of one run, and takes minutes for a hundred groups.

Without repeats there is no interval: the steps of one run do not show how much two runs of a setting differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache

import numpy as np

_CONFIDENCE = 0.95
_WIDEST = math.log(100)


class Basis(Enum):
    """The source of intervals."""

    repeats = "repeats"
    predictions = "predictions"
    nothing = "nothing"


@dataclass(frozen=True)
class Interval:
    """A value and its interval with the stated confidence.

    Attributes:
        value: the estimate.
        low: the lower end, 0 if the runs determine too little; NaN without repeats.
        high: the upper end, infinite if the runs determine too little; NaN likewise.
    """

    value: float
    low: float = math.nan
    high: float = math.nan

    @property
    def known(self) -> bool:
        return math.isfinite(self.low)


class Speeds:
    """The speeds of groups of runs.

    Args:
        runs: group -> the speeds of its runs, above 0.
    """

    def __init__(self, runs: Mapping[int, Sequence[float]]) -> None:
        logs = {group: np.log(speeds) for group, speeds in runs.items()}
        self._means = {group: float(of.mean()) for group, of in logs.items()}
        self._counts = {group: len(of) for group, of in logs.items()}
        self._freedom = sum(self._counts.values()) - len(logs)
        rest = sum(float(((of - of.mean()) ** 2).sum()) for of in logs.values())
        self._variance = rest / max(self._freedom, 1)

    def has(self, group: int) -> bool:
        """Whether a run of the group is known."""
        return group in self._means

    @property
    def basis(self) -> Basis:
        return Basis.repeats if self._freedom > 0 else Basis.nothing

    def speed(self, group: int) -> Interval:
        return self._interval(self._means[group], 1 / self._counts[group], groups=2)  # of two groups it is Student's

    def ratio(self, a: int, b: int) -> Interval:
        if a == b:
            return Interval(1.0, 1.0, 1.0)
        share = 1 / self._counts[a] + 1 / self._counts[b]
        return self._interval(self._means[a] - self._means[b], share, len(self._means))

    def _interval(self, log: float, share: float, groups: int) -> Interval:
        """Return the interval around a logarithm; from 0 to infinity if it spans more than a factor of a hundred.

        Args:
            log: of a speed or a ratio.
            share: its variance over the variance of a run.
            groups: how many of them the quantile is for.
        """
        value = math.exp(log)
        if self.basis is Basis.nothing:
            return Interval(value)
        half = _quantile(groups, self._freedom) * math.sqrt(self._variance * share)
        if half > _WIDEST:
            return Interval(value, 0.0, math.inf)
        return Interval(value, math.exp(log - half), math.exp(log + half))


@cache
def _quantile(groups: int, freedom: int) -> float:
    from scipy.stats import studentized_range

    return float(studentized_range.ppf(_CONFIDENCE, groups, freedom)) / math.sqrt(2)
