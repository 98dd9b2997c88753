"""The uncertainty of speeds: an interval for each group of runs, and for the ratio of two. Pure.

Noise is a factor on a speed, so all computation is in logarithms. With repeats, a run's logarithm is modelled as the
sum of three terms: its group's, its round's (drift between rounds) and noise with one variance in all groups. That is
an additive two-way layout with unequal numbers, fitted by least squares. A group's interval is Student's. The intervals
of all ratios of a sweep hold together with the stated confidence: they are Tukey's with Kramer's standard errors
(Kramer, "Extension of multiple range tests to group means with unequal numbers of replications", Biometrics 12, 1956).
So the fastest of many is not called so for being the luckiest.

Without repeats there is no interval: the steps of one run do not show how much two runs of a setting differ.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache, cached_property, partial
from typing import NamedTuple

import numpy as np

SIGNIFICANCE = 0.05
_WIDEST = math.log(100)
_POCOCK = {1: 0.05, 2: 0.0294, 3: 0.0221, 4: 0.0182, 5: 0.0158}  # all looks together: 0.05


class Basis(Enum):
    """The source of intervals."""

    repeats = "repeats"
    predictions = "predictions"
    nothing = "nothing"


@dataclass(frozen=True)
class Run:
    """A run of a group.

    Attributes:
        group: its index in the list of groups, from 0.
        round: of repeats; any numbers.
        speed: above 0.
        error: the relative standard error of the speed by the run's own steps; None: not known.
    """

    group: int
    round: int
    speed: float
    error: float | None = None


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
        """Whether there is an interval."""
        return math.isfinite(self.low)


def level_of(looks: int) -> float:
    """Return the significance of each of so many looks, all of which together have the usual one.

    Pocock's ("Group sequential methods in the design and analysis of clinical trials", Biometrika 64, 1977); beyond
    five looks Bonferroni's.
    """
    return _POCOCK.get(looks, SIGNIFICANCE / max(looks, 1))


class _Fit(NamedTuple):
    """The least-squares solution.

    Attributes:
        effects: the logarithm of each group's speed, in the mean of the rounds.
        counts: of each group's runs.
        share: of each group's runs in each round.
        inverse: of the rounds' normal equations, after the groups were eliminated.
        determined: the projector on the part of the rounds that the runs determine.
        freedom: the degrees of freedom that are left.
        variance: of a run: what repeats leave unexplained, and at least what the steps of the runs show.
    """

    effects: np.ndarray
    counts: np.ndarray
    share: np.ndarray
    inverse: np.ndarray
    determined: np.ndarray
    freedom: int
    variance: float


class Speeds:
    """The speeds of groups of runs.

    Args:
        runs: of all groups.
        significance: the probability with which the interval of any ratio of the sweep misses. That of a group's own
            speed misses in five of a hundred.
    """

    def __init__(self, runs: Sequence[Run], significance: float = SIGNIFICANCE) -> None:
        self._significance = significance
        self._runs = list(runs)
        self._place = {group: i for i, group in enumerate(sorted({run.group for run in runs}))}

    def has(self, group: int) -> bool:
        """Whether a run of the group is known."""
        return group in self._place

    @property
    def basis(self) -> Basis:
        """The source of the intervals."""
        return Basis.repeats if self._fit.freedom > 0 else Basis.nothing

    def speed(self, group: int) -> Interval:
        """Return the group's speed over the rounds of the sweep, and its interval."""
        fit, i = self._fit, self._place[group]
        rounds = fit.share[i] - 1 / fit.share.shape[1]
        return self._interval(fit.effects[i], 1 / fit.counts[i], rounds, partial(_student, SIGNIFICANCE))

    def ratio(self, a: int, b: int) -> Interval:
        """Return the speed of a group over that of another, and its interval."""
        if a == b:
            return Interval(1.0, 1.0, 1.0)
        fit, i, j = self._fit, self._place[a], self._place[b]
        own, rounds = 1 / fit.counts[i] + 1 / fit.counts[j], fit.share[i] - fit.share[j]
        quantile = partial(_tukey, self._significance, len(self._place))
        return self._interval(fit.effects[i] - fit.effects[j], own, rounds, quantile)

    def _interval(self, log: float, own: float, rounds: np.ndarray, quantile: Callable[[int], float]) -> Interval:
        """Return the interval around a logarithm; from 0 to infinity if it spans more than a factor of a hundred.

        Args:
            log: of a speed or a ratio.
            own: its variance by the runs of its groups, over the variance of a run.
            rounds: the weight of each round in it.
            quantile: of its error, by the degrees of freedom.
        """
        fit, value = self._fit, math.exp(log)
        if self.basis is Basis.nothing:
            return Interval(value)
        half = quantile(fit.freedom) * math.sqrt(fit.variance * (own + rounds @ fit.inverse @ rounds))
        # Groups that never met in a round, nor met a third that both met, leave the weights undetermined.
        if half > _WIDEST or np.abs(rounds - fit.determined @ rounds).max() >= 1e-6:
            return Interval(value, 0.0, math.inf)
        return Interval(value, math.exp(log - half), math.exp(log + half))

    @cached_property
    def _fit(self) -> _Fit:
        """The normal equations, solved by the rounds: there are few of them, and may be thousands of groups."""
        y = np.array([math.log(run.speed) for run in self._runs])
        groups = np.array([self._place[run.group] for run in self._runs], dtype=int)
        rounds = self._rounds()
        table = np.zeros((len(self._place), rounds.max(initial=0) + 1))
        np.add.at(table, (groups, rounds), 1.0)
        counts = table.sum(axis=1)
        share = table / counts[:, None]
        reduced = np.diag(table.sum(axis=0)) - table.T @ share
        inverse = np.linalg.pinv(reduced, hermitian=True)
        means = np.bincount(groups, y) / counts
        of_rounds = inverse @ np.bincount(rounds, y - means[groups], minlength=table.shape[1])
        of_rounds -= of_rounds.mean()
        effects = means - share @ of_rounds
        residuals = y - effects[groups] - of_rounds[rounds]
        freedom = len(y) - len(counts) - int(np.linalg.matrix_rank(inverse, hermitian=True))
        errors = [run.error for run in self._runs if run.error]
        floor = sum(error**2 for error in errors) / len(errors) if errors else 0.0
        variance = max(float(residuals @ residuals) / max(freedom, 1), floor)
        return _Fit(effects, counts, share, inverse, inverse @ reduced, freedom, variance)

    def _rounds(self) -> np.ndarray:
        """Return the place of each run's round.

        A group alone in its round tells nothing of the round: where most are alone, as with seeds that a search draws,
        there is one round.
        """
        groups_in = Counter(number for number, _ in {(run.round, run.group) for run in self._runs})
        alone = sum(groups_in[run.round] == 1 for run in self._runs)
        place = {number: i for i, number in enumerate(sorted(groups_in))}
        together = 2 * alone < len(self._runs)
        return np.array([place[run.round] if together else 0 for run in self._runs], dtype=int)


@cache
def _student(significance: float, freedom: int) -> float:
    from scipy.stats import t

    return float(t.ppf(1 - significance / 2, freedom))


@cache
def _tukey(significance: float, groups: int, freedom: int) -> float:
    from scipy.stats import studentized_range

    return float(studentized_range.ppf(1 - significance, groups, freedom)) / math.sqrt(2)
