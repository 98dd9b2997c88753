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
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache, cached_property

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


class Speeds:
    """The speeds of groups of runs.

    Args:
        runs: of all groups.
        significance: the probability with which the interval of any ratio of the sweep misses. That of a group's own
            speed misses in five of a hundred.
    """

    def __init__(self, runs: Sequence[Run], significance: float = SIGNIFICANCE) -> None:
        self._significance = significance
        self._known = sorted({run.group for run in runs})
        place = {group: i for i, group in enumerate(self._known)}
        rounds = {number: i for i, number in enumerate(sorted({run.round for run in runs}))}
        self._place = place
        self._runs = list(runs)
        self._y = np.array([math.log(run.speed) for run in runs])
        self._groups = np.array([place[run.group] for run in runs], dtype=int)
        self._rounds = np.array([rounds[run.round] for run in runs], dtype=int)
        # A group alone in its round tells nothing of the round: where most are alone, as with seeds that a search
        # draws, there are no rounds.
        met = {i for i in set(self._rounds.tolist()) if len(set(self._groups[self._rounds == i].tolist())) > 1}
        alone = sum(i not in met for i in self._rounds.tolist())
        self._num_rounds = len(rounds) if 2 * alone < len(self._runs) else 1
        if self._num_rounds == 1:
            self._rounds = np.zeros_like(self._rounds)

    def has(self, group: int) -> bool:
        """Whether a run of the group is known."""
        return group in self._place

    @cached_property
    def basis(self) -> Basis:
        """The source of the intervals."""
        return Basis.repeats if self._freedom > 0 else Basis.nothing

    def estimate(self, group: int) -> float:
        """Return the group's speed over the rounds of the sweep."""
        return math.exp(float(self._effects[self._place[group]]))

    def speed(self, group: int) -> Interval:
        """Return the group's speed over the rounds of the sweep, and its interval."""
        place = self._place[group]
        log = self._effects[place]
        if self.basis is Basis.nothing:
            return Interval(math.exp(log))
        if not self._estimable(self._share[place] - 1 / self._num_rounds):
            return _interval(log, math.inf)
        error = math.sqrt(self._variance * self._unscaled(place, place))
        return _interval(log, _student(SIGNIFICANCE, self._freedom) * error)

    def ratio(self, a: int, b: int) -> Interval:
        """Return the speed of a group over that of another, and its interval."""
        if a == b:
            return Interval(1.0, 1.0, 1.0)
        i, j = self._place[a], self._place[b]
        log = float(self._effects[i] - self._effects[j])
        if self.basis is Basis.nothing:
            return Interval(math.exp(log))
        if not self._estimable(self._share[i] - self._share[j]):
            return _interval(log, math.inf)
        unscaled = self._unscaled(i, i) + self._unscaled(j, j) - 2 * self._unscaled(i, j)
        error = math.sqrt(self._variance * max(unscaled, 0.0))
        return _interval(log, _tukey(self._significance, len(self._known), self._freedom) * error)

    # The normal equations, solved by the rounds: there are few of them, and may be thousands of groups.

    @cached_property
    def _counts(self) -> np.ndarray:
        """Runs by group and round."""
        counts = np.zeros((len(self._known), self._num_rounds))
        np.add.at(counts, (self._groups, self._rounds), 1.0)
        return counts

    @cached_property
    def _share(self) -> np.ndarray:
        """The share of each group's runs in each round."""
        return self._counts / self._counts.sum(axis=1, keepdims=True)

    @cached_property
    def _reduced(self) -> np.ndarray:
        """The rounds' normal equations, after the groups were eliminated."""
        return np.diag(self._counts.sum(axis=0)) - self._counts.T @ self._share

    @cached_property
    def _inverse(self) -> np.ndarray:
        return np.linalg.pinv(self._reduced, hermitian=True)

    @cached_property
    def _fixed(self) -> np.ndarray:
        """The projector on the part of the rounds that the runs determine."""
        projector: np.ndarray = self._inverse @ self._reduced
        return projector

    def _estimable(self, rounds: np.ndarray) -> bool:
        """Return whether the runs determine a sum of rounds.

        They do not if groups never met in a round, nor met a third that both met.
        """
        return bool(np.abs(rounds - self._fixed @ rounds).max() < 1e-6)

    @cached_property
    def _round_effects(self) -> np.ndarray:
        sums = np.bincount(self._rounds, self._y - self._means[self._groups], minlength=self._num_rounds)
        effects: np.ndarray = self._inverse @ sums
        return effects - effects.mean()

    @cached_property
    def _means(self) -> np.ndarray:
        return np.bincount(self._groups, self._y) / self._counts.sum(axis=1)

    @cached_property
    def _effects(self) -> np.ndarray:
        """The logarithm of each group's speed, in the mean of the rounds."""
        effects: np.ndarray = self._means - self._share @ self._round_effects
        return effects

    def _unscaled(self, i: int, j: int) -> float:
        """Return the covariance of two groups' effects, over the variance of a run."""
        first, second = (self._share[k] - 1 / self._num_rounds for k in (i, j))
        own = 1 / self._counts[i].sum() if i == j else 0.0
        return float(own + first @ self._inverse @ second)

    @cached_property
    def _freedom(self) -> int:
        rank = len(self._known) + int(np.linalg.matrix_rank(self._inverse, hermitian=True))
        return len(self._runs) - rank if self._runs else 0

    @cached_property
    def _variance(self) -> float:
        """The variance of a run: what repeats leave unexplained, and at least what the steps of the runs show."""
        residuals = self._y - self._effects[self._groups] - self._round_effects[self._rounds]
        errors = [run.error for run in self._runs if run.error]
        floor = sum(error**2 for error in errors) / len(errors) if errors else 0.0
        return max(float(residuals @ residuals) / self._freedom, floor)


def _interval(log: float, half: float) -> Interval:
    """Return the interval around a logarithm; from 0 to infinity if it spans more than a factor of a hundred."""
    if half > _WIDEST:
        return Interval(math.exp(log), 0.0, math.inf)
    return Interval(math.exp(log), math.exp(log - half), math.exp(log + half))


@cache
def _student(significance: float, freedom: int) -> float:
    from scipy.stats import t

    return float(t.ppf(1 - significance / 2, freedom))


@cache
def _tukey(significance: float, groups: int, freedom: int) -> float:
    from scipy.stats import studentized_range

    return float(studentized_range.ppf(1 - significance, groups, freedom)) / math.sqrt(2)
