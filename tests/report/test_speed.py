"""Intervals of speeds: against published quantiles by hand, and against sweeps with planted effects and noise."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from fsdp_lab.report.speed import Basis, Run, Speeds


def test_two_groups_by_hand():
    """Logarithms 0 and 0.2 in the first round, 0.1 and 0.2 in the second, 0.2 and 0.5 in the third: differences 0.2,
    0.1 and 0.3. Of these the mean is 0.2 and its standard error 0.1 / sqrt(3); t of two degrees is 4.3027, and Tukey's
    interval of two groups is Student's."""
    logs = [(0.0, 0.2), (0.1, 0.2), (0.2, 0.5)]
    runs = [Run(group, number, math.exp(y)) for number, pair in enumerate(logs) for group, y in enumerate(pair)]
    speeds = Speeds(runs)
    ratio, half = speeds.ratio(1, 0), 4.3027 * 0.1 / math.sqrt(3)
    assert speeds.basis is Basis.repeats
    assert [math.log(x) for x in (ratio.value, ratio.low, ratio.high)] == pytest.approx(
        [0.2, 0.2 - half, 0.2 + half], abs=1e-4
    )
    # the variance of a run is half of that of a difference: the standard error of a mean of three is 0.1 / sqrt(6)
    own, half = speeds.speed(0), 4.3027 * 0.1 / math.sqrt(6)
    assert [math.log(x) for x in (own.value, own.low, own.high)] == pytest.approx(
        [0.1, 0.1 - half, 0.1 + half], abs=1e-4
    )


def test_more_groups_are_wider_apart_by_tukeys_published_quantiles():
    """Four groups in three rounds leave 6 degrees of freedom; the studentized range is 4.90 there at 5 %, in tables."""
    noise = np.random.default_rng(1).normal(0, 0.1, (3, 4))
    runs = [Run(g, r, math.exp(noise[r, g])) for r in range(3) for g in range(4)]
    ratio = Speeds(runs).ratio(0, 1)
    rest = noise - noise.mean(axis=0) - noise.mean(axis=1, keepdims=True) + noise.mean()
    error = math.sqrt((rest**2).sum() / 6 / 3)
    assert math.log(ratio.high / ratio.value) == pytest.approx(4.90 * error, rel=1e-3)


def test_rounds_that_lack_groups_are_fitted_by_least_squares():
    """The same as by one solution of the whole system."""
    rng = np.random.default_rng(2)
    present = [(g, r) for g in range(4) for r in range(4) if g < 2 or r < 2]
    y = rng.normal(size=len(present))
    speeds = Speeds([Run(g, r, math.exp(value)) for (g, r), value in zip(present, y, strict=True)])
    design = np.zeros((len(present), 8))
    for row, (g, r) in enumerate(present):
        design[row, [g, 4 + r]] = 1
    solution, *_ = np.linalg.lstsq(design, y, rcond=None)
    residuals = y - design @ solution
    variance = residuals @ residuals / (len(y) - np.linalg.matrix_rank(design))
    contrast = np.array([1, 0, 0, -1, 0, 0, 0, 0])
    error = math.sqrt(variance * contrast @ np.linalg.pinv(design.T @ design) @ contrast)
    ratio = speeds.ratio(0, 3)
    assert math.log(ratio.value) == pytest.approx(contrast @ solution)
    # 12 runs, 4 groups and 3 differences of rounds: 5 degrees of freedom, where the range of 4 is 5.22 in tables
    assert math.log(ratio.high / ratio.value) == pytest.approx(5.22 / math.sqrt(2) * error, rel=1e-3)


def test_without_repeats_there_is_no_interval_whatever_the_steps_show():
    speeds = Speeds([Run(0, 0, 1000.0, 0.01), Run(1, 0, 1100.0, 0.02)])
    assert speeds.basis is Basis.nothing
    assert speeds.ratio(1, 0).value == pytest.approx(1.1) and not speeds.ratio(1, 0).known
    assert not speeds.speed(0).known


def test_repeats_that_agree_by_luck_are_no_surer_than_their_steps():
    alike = [Run(g, r, 1000.0, 0.05) for g in range(2) for r in range(2)]
    # the variance of each run is no less than 0.05 squared, and t of one degree of freedom is 12.706
    assert math.log(Speeds(alike).ratio(0, 1).high) == pytest.approx(12.706 * 0.05, rel=1e-3)


def independent(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.normal(0, 0.05, count)


def drifting(rng: np.random.Generator, count: int) -> np.ndarray:
    """A drift of up to 20 % over the sweep, up or down, and a random walk."""
    line = rng.uniform(-0.2, 0.2) * (np.arange(count) / count - 0.5)
    return rng.normal(0, 0.04, count) + line + np.cumsum(rng.normal(0, 0.01, count))


def one_slow_in_ten(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.normal(0, 0.03, count) + np.where(rng.random(count) < 0.1, math.log(0.5), 0.0)


def planted(noise: np.ndarray, effects: np.ndarray) -> list[Run]:
    """Rounds in the order in which a sweep runs them: every second one backwards."""
    groups = len(effects)
    order = [
        (r, g) for r in range(len(noise) // groups) for g in (range(groups) if r % 2 == 0 else range(groups)[::-1])
    ]
    return [Run(g, r, math.exp(effects[g] + e)) for (r, g), e in zip(order, noise, strict=True)]


@pytest.mark.parametrize("groups", [2, 4, pytest.param(8, marks=pytest.mark.ci)])
@pytest.mark.parametrize("shape", [independent, drifting, one_slow_in_ten])
def test_intervals_cover_the_truth(shape: Callable[[np.random.Generator, int], np.ndarray], groups: int):
    """Of 800 sweeps of three rounds: how often a setting's interval, that of a ratio, and those of all ratios at once
    hold what was planted; and how often any setting is called faster than one that is as fast or faster. The planted
    speed of a setting is that of an ordinary run, in the mean of what drifted."""
    rng = np.random.default_rng(groups)
    own = pair = whole = wrong = 0.0
    sweeps = 800
    for _ in range(sweeps):
        effects = rng.choice([0.0, 0.0, 0.05, 0.3], groups)
        noise = shape(rng, 3 * groups)
        drift = noise.mean() if shape is drifting else 0.0
        speeds = Speeds(planted(noise, effects))
        intervals = [speeds.speed(g) for g in range(groups)]
        own += np.mean([i.low <= math.exp(effects[g] + drift) <= i.high for g, i in enumerate(intervals)])
        ratios = [(a, b, speeds.ratio(a, b)) for a in range(groups) for b in range(a)]
        held = [r.low <= math.exp(effects[a] - effects[b]) <= r.high for a, b, r in ratios]
        pair += held[0]
        whole += all(held)
        wrong += any(
            (r.low > 1 and effects[a] <= effects[b]) or (r.high < 1 and effects[a] >= effects[b]) for a, b, r in ratios
        )
    assert 0.92 <= own / sweeps <= 0.98
    assert 0.92 <= whole / sweeps <= (0.98 if shape is not one_slow_in_ten else 0.99)
    assert pair / sweeps >= 0.92
    assert wrong / sweeps <= 0.05


def test_groups_that_never_met_in_a_round_are_not_compared():
    """Two groups in rounds 0 and 2, two in rounds 1 and 3: what the rounds differ by is in every ratio across."""
    logs = {(g, r): 0.01 * g * r for r in range(4) for g in ((0, 1) if r % 2 == 0 else (2, 3))}
    speeds = Speeds([Run(g, r, math.exp(y)) for (g, r), y in logs.items()])
    assert speeds.ratio(0, 1).high < math.inf
    assert (speeds.ratio(0, 2).low, speeds.ratio(0, 2).high) == (0.0, math.inf)


def test_seeds_that_a_search_drew_are_repeats_and_no_rounds():
    """Six runs of two groups, each with a seed of its own: four degrees of freedom, where t is 2.776."""
    logs = (0.0, 0.1, 0.2), (0.5, 0.4, 0.6)
    runs = [Run(g, 10 * g + i, math.exp(y)) for g, group in enumerate(logs) for i, y in enumerate(group)]
    ratio = Speeds(runs).ratio(1, 0)
    assert math.log(ratio.high / ratio.value) == pytest.approx(2.776 * 0.1 * math.sqrt(2 / 3), rel=1e-3)
