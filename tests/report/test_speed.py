"""Intervals of speeds: against published quantiles by hand, SciPy, and sweeps with planted effects and noise."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from fsdp_lab.report.speed import Measured, measured


def of_logs(*groups: tuple[float, ...]) -> dict[int, Measured]:
    """The groups' speeds, given by their logarithms."""
    return measured({group: [math.exp(y) for y in logs] for group, logs in enumerate(groups)})


def test_two_groups_by_hand():
    """Means 0.1 and 0.3. The squares within are 0.02 and 0.06, so a run's variance is 0.08 / 4 = 0.02; t of four
    degrees is 2.7764, and Tukey's interval of two groups is Student's."""
    speeds = of_logs((0.0, 0.1, 0.2), (0.2, 0.2, 0.5))
    ratio, half = speeds[1].ratio(speeds[0]), 2.7764 * math.sqrt(0.02 * 2 / 3)
    assert [math.log(x) for x in (ratio.value, ratio.low, ratio.high)] == pytest.approx(
        [0.2, 0.2 - half, 0.2 + half], abs=1e-4
    )
    own, half = speeds[0].interval, 2.7764 * math.sqrt(0.02 / 3)
    assert [math.log(x) for x in (own.value, own.low, own.high)] == pytest.approx(
        [0.1, 0.1 - half, 0.1 + half], abs=1e-4
    )


def test_more_groups_have_tukeys_published_quantiles():
    """Four groups of three runs leave 8 degrees of freedom; the studentized range is 4.53 there at 5 %, in tables."""
    noise = np.random.default_rng(1).normal(0, 0.1, (4, 3))
    one, other, *_ = of_logs(*map(tuple, noise)).values()
    ratio = one.ratio(other)
    error = math.sqrt(noise.var(axis=1, ddof=1).mean() / 3)
    assert math.log(ratio.high / ratio.value) == pytest.approx(4.53 * error, rel=1e-3)


def test_a_group_of_one_run_has_the_noise_of_the_others():
    """Of which three leave two degrees of freedom, where t is 4.3027."""
    several, one = of_logs((0.0, 0.1, 0.2), (0.5,)).values()
    ratio = one.ratio(several)
    assert math.log(ratio.high / ratio.value) == pytest.approx(4.3027 * 0.1 * math.sqrt(1 + 1 / 3), rel=1e-3)


def test_without_repeats_there_is_no_interval():
    speeds = measured({0: [1000.0], 1: [1100.0]})
    assert speeds[1].ratio(speeds[0]).value == pytest.approx(1.1) and not speeds[1].ratio(speeds[0]).known
    assert not speeds[0].interval.known


def test_what_slows_a_whole_round_is_not_in_a_ratio():
    """In rounds of 1000, 900 and 800 another setting is 5 % faster, and 1 % more in the first: the residuals are
    half of 0.01 * (2/3, -1/3, -1/3), with both signs, and two degrees of freedom are left, where t is 4.3027."""
    logs = [math.log(x) for x in (1000.0, 900.0, 800.0)]
    runs = {
        0: [math.exp(y) for y in logs],
        1: [1.05 * math.exp(y + e) for y, e in zip(logs, (0.01, 0, 0), strict=True)],
    }
    speeds = measured(runs, {0: [0, 1, 2], 1: [0, 1, 2]})
    ratio, variance = speeds[1].ratio(speeds[0]), 2 * (0.01**2 / 4) * (6 / 9) / 2
    half = 4.3027 * math.sqrt(variance * 2 / 3)
    expected = [math.log(1.05) + 0.01 / 3, half, half]
    found = [math.log(x) for x in (ratio.value, ratio.value / ratio.low, ratio.high / ratio.value)]
    assert found == pytest.approx(expected, abs=1e-4) and ratio.low > 1
    own = measured(runs)
    assert speeds[0].interval == own[0].interval, "of one speed it is noise"
    for rounds in ([0, 1, 2], [0, 1, 1]), ([0, 0, 0], [0, 1, 2]):
        incomplete = measured(runs, dict(enumerate(rounds)))
        assert incomplete[1].ratio(incomplete[0]) == own[1].ratio(own[0]), "a round lacks a setting"
    two = {group: speeds[:2] for group, speeds in runs.items()}
    few = measured(two, {0: [0, 1], 1: [0, 1]})
    assert few[1].ratio(few[0]) == (plain := measured(two))[1].ratio(plain[0]), "one degree of freedom would be left"


def independent(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.normal(0, 0.05, count)


def drifting(rng: np.random.Generator, count: int) -> np.ndarray:
    """A drift of up to 20 % over the sweep, up or down, and a random walk."""
    line = rng.uniform(-0.2, 0.2) * (np.arange(count) / count - 0.5)
    return rng.normal(0, 0.04, count) + line + np.cumsum(rng.normal(0, 0.01, count))


def slow_rounds(rng: np.random.Generator, count: int) -> np.ndarray:
    """Three rounds, each as a whole up to 20 % slower than another."""
    return rng.normal(0, 0.03, count) + np.repeat(rng.uniform(-0.1, 0.1, 3), count // 3)


def one_slow_in_ten(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.normal(0, 0.03, count) + np.where(rng.random(count) < 0.1, math.log(0.5), 0.0)


def planted(noise: np.ndarray, effects: np.ndarray) -> dict[int, list[float]]:
    """Rounds in the order in which a sweep runs them: every second one backwards."""
    groups = len(effects)
    order = [g for r in range(len(noise) // groups) for g in (range(groups) if r % 2 == 0 else range(groups)[::-1])]
    runs: dict[int, list[float]] = {g: [] for g in range(groups)}
    for g, e in zip(order, noise, strict=True):
        runs[g].append(math.exp(effects[g] + e))
    return runs


@pytest.mark.parametrize("groups", [2, 4, pytest.param(8, marks=pytest.mark.ci)])
@pytest.mark.parametrize("shape", [independent, drifting, slow_rounds, one_slow_in_ten])
def test_intervals_cover_the_truth(shape: Callable[[np.random.Generator, int], np.ndarray], groups: int):
    """Of 800 sweeps of three rounds: how often a setting's interval, that of a ratio, and those of all ratios at once
    hold what was planted; and how often any setting is called faster than one that is as fast or faster. The planted
    speed of a setting is that of an ordinary run, in the mean of what drifted."""
    rng, counts, sweeps = np.random.default_rng(groups), np.zeros(4), 800
    for _ in range(sweeps):
        effects, noise = rng.choice([0.0, 0.0, 0.05, 0.3], groups), shape(rng, 3 * groups)
        speeds = measured(planted(noise, effects), dict.fromkeys(range(groups), range(3)))
        drift = noise.mean() if shape in (drifting, slow_rounds) else 0.0
        own = [speeds[g].interval.low <= math.exp(effects[g] + drift) <= speeds[g].interval.high for g in range(groups)]
        pairs = [(a, b) for a in range(groups) for b in range(a)]
        ratios = [(speeds[a].ratio(speeds[b]), math.exp(effects[a] - effects[b])) for a, b in pairs]
        held = [ratio.low <= truth <= ratio.high for ratio, truth in ratios]
        wrong = any(ratio.low > 1 >= truth or ratio.high < 1 <= truth for ratio, truth in ratios)
        counts += [np.mean(own), held[0], all(held), wrong]
    own_share, pair_share, whole_share, wrong_share = counts / sweeps
    # of one setting's speed, a drift between rounds is noise like any other: it makes intervals wider
    assert 0.92 <= own_share <= (0.98 if shape not in (drifting, slow_rounds) else 1.0)
    assert 0.92 <= whole_share <= {one_slow_in_ten: 0.99, drifting: 1.0}.get(shape, 0.98)
    assert pair_share >= 0.92 and wrong_share <= 0.05
