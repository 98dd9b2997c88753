"""Speeds with their uncertainty, measured or predicted, and the intervals of their ratios. Pure.

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
from functools import cache

import numpy as np

EQUAL = 0.0005  # as a share of a speed: predictions that differ by less are the same
_CONFIDENCE = 0.95
_WIDEST = math.log(100)


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


@dataclass(frozen=True)
class Measured:
    """The speed of a group of runs, with the noise of all groups.

    Attributes:
        log: the mean of the logarithms of its runs.
        runs: how many they are.
        variance: of the logarithm of a run, in every group.
        freedom: the degrees of freedom that determine it; 0: no group has repeats.
        groups: how many there are.
    """

    log: float
    runs: int
    variance: float
    freedom: int
    groups: int

    @property
    def interval(self) -> Interval:
        return self._around(self.log, 1 / self.runs, groups=2)  # of two groups it is Student's

    def ratio(self, other: Measured) -> Interval:
        """Return the speed over another's of the same sweep."""
        if self is other:
            return Interval(1.0, 1.0, 1.0)
        return self._around(self.log - other.log, 1 / self.runs + 1 / other.runs, self.groups)

    def _around(self, log: float, share: float, groups: int) -> Interval:
        """Return the interval around a logarithm; from 0 to infinity if it spans more than a factor of a hundred.

        Args:
            share: its variance over the variance of a run.
            groups: how many of them the quantile is for.
        """
        value = math.exp(log)
        if not self.freedom:
            return Interval(value)
        half = _quantile(groups, self.freedom) * math.sqrt(self.variance * share)
        if half > _WIDEST:
            return Interval(value, 0.0, math.inf)
        return Interval(value, math.exp(log - half), math.exp(log + half))


@cache
def _quantile(groups: int, freedom: int) -> float:
    from scipy.stats import studentized_range

    return float(studentized_range.ppf(_CONFIDENCE, groups, freedom)) / math.sqrt(2)


def measured(runs: Mapping[int, Sequence[float]]) -> dict[int, Measured]:
    """Return the speed of each group by the speeds of its runs, which are above 0."""
    logs = {group: np.log(speeds) for group, speeds in runs.items()}
    freedom = sum(map(len, logs.values())) - len(logs)
    rest = sum(float(((of - of.mean()) ** 2).sum()) for of in logs.values())
    noise = rest / max(freedom, 1), freedom, len(logs)
    return {group: Measured(float(of.mean()), len(of), *noise) for group, of in logs.items()}


@dataclass(frozen=True)
class Predicted:
    """A predicted speed.

    Attributes:
        interval: samples/s, and the range that holds nine of ten such predictions.
        relative: the error of the ratio of two predictions of one group, for nine of ten; None: not known.
        group: see `fsdp_lab.forecast.keep.ratio_group`; "": not known.
        samples: the global batch size.
    """

    interval: Interval
    relative: float | None = None
    group: str = ""
    samples: int = 0

    def ratio(self, other: Predicted) -> Interval:
        """Return the speed over another's: with the error of their ratio if it is known, else with both ranges."""
        one, two = self.interval, other.interval
        ratio, error = one.value / two.value, self.ratio_error(other)
        if error is None:
            return Interval(ratio, one.low / two.high, one.high / two.low)
        return Interval(ratio, ratio / (1 + error), ratio * (1 + error))

    def ratio_error(self, other: Predicted) -> float | None:
        """Return the error of the ratio of the two; None: not known.

        An error that is common to all predictions of a group need not be common to two groups.
        """
        if self.relative is None or other.relative is None or not self.group or self.group != other.group:
            return None
        return max(self.relative, other.relative)
