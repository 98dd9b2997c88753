"""Speeds with their uncertainty, measured or predicted, and the intervals of their ratios. Pure.

Noise is a factor on a speed, so all computation is in logarithms, with one variance in all groups. A group's interval
is Student's. The intervals of all ratios of a sweep hold together with the stated confidence: they are Tukey's with
Kramer's standard errors (Kramer, "Extension of multiple range tests to group means with unequal numbers of
replications", Biometrics 12, 1956). So the luckiest of many runs is not called the fastest.

`scipy.stats.tukey_hsd` gives the same intervals. It refuses groups of one run, and takes minutes for a hundred groups.

Repeats run in rounds. If each round has every group, the rounds' means are subtracted for the ratios, because a slow
round slows all groups. The interval of one group's speed includes them.

Without repeats there is no interval: the steps of one run do not show how much two runs of a setting differ.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

EQUAL = 0.0005  # as a share of a speed: predictions that differ by less are equal
_CONFIDENCE = 0.95
_WIDEST = math.log(100)
_FEWEST = 2  # degrees of freedom: a single one makes an interval three times as wide as two do


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


class Noise(NamedTuple):
    """The noise of a run, the same in every group.

    Attributes:
        variance: of its logarithm.
        freedom: the degrees of freedom that determine it; 0: no group has repeats.
    """

    variance: float
    freedom: int


@dataclass(frozen=True)
class Measured:
    """The speed of a group of runs, with the noise of all groups.

    Attributes:
        log: the mean of the logarithms of its runs.
        runs: their number.
        noise: of runs.
        within: of runs of one round, if rounds are complete.
        groups: their number.
    """

    log: float
    runs: int
    noise: Noise
    within: Noise
    groups: int

    @property
    def interval(self) -> Interval:
        return _around(self.log, 1 / self.runs, self.noise, groups=2)  # of two groups it is Student's

    def ratio(self, other: Measured) -> Interval:
        """Return the speed over another's of the same sweep."""
        if self is other:
            return Interval(1.0, 1.0, 1.0)
        return _around(self.log - other.log, 1 / self.runs + 1 / other.runs, self.within, self.groups)


def _around(log: float, share: float, noise: Noise, groups: int) -> Interval:
    """Return the interval around a logarithm; from 0 to infinity if it spans more than a factor of a hundred.

    Args:
        share: its variance over the variance of a run.
        groups: how many of them the quantile is for.
    """
    value = math.exp(log)
    if not noise.freedom:
        return Interval(value)
    half = _quantile(groups, noise.freedom) * math.sqrt(noise.variance * share)
    if half > _WIDEST:
        return Interval(value, 0.0, math.inf)
    return Interval(value, math.exp(log - half), math.exp(log + half))


@cache
def _quantile(groups: int, freedom: int) -> float:
    from scipy.stats import studentized_range

    return float(studentized_range.ppf(_CONFIDENCE, groups, freedom)) / math.sqrt(2)


def measured(
    runs: Mapping[int, Sequence[float]], rounds: Mapping[int, Sequence[int]] | None = None
) -> dict[int, Measured]:
    """Return the speed of each group by the speeds of its runs, which are above 0.

    Args:
        rounds: the number of the round of each run; None: not known.
    """
    logs = {group: np.log(speeds) for group, speeds in runs.items()}
    rest = {group: of - of.mean() for group, of in logs.items()}
    noise = _noise_of(rest, sum(map(len, logs.values())) - len(logs))
    within = _within_rounds(rest, rounds, noise) if rounds else noise
    return {group: Measured(float(of.mean()), len(of), noise, within, len(logs)) for group, of in logs.items()}


def _noise_of(rest: Mapping[int, np.ndarray], freedom: int) -> Noise:
    return Noise(sum(float((of**2).sum()) for of in rest.values()) / max(freedom, 1), freedom)


def _within_rounds(rest: Mapping[int, np.ndarray], rounds: Mapping[int, Sequence[int]], noise: Noise) -> Noise:
    """Return the noise without the rounds' means, if every round has as many runs of each group; else `noise`."""
    counted = [Counter(rounds[group]) for group in rest]
    freedom = noise.freedom - len(counted[0]) + 1 if counted else 0
    if freedom < _FEWEST or any(counts != counted[0] for counts in counted):
        return noise
    means = {r: np.mean([of[np.equal(rounds[group], r)].mean() for group, of in rest.items()]) for r in counted[0]}
    return _noise_of({group: of - [means[r] for r in rounds[group]] for group, of in rest.items()}, freedom)


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
