"""The gate on frames of which the answer is known by hand, and on noise of which the share of alarms is known."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pandas as pd
import pytest
from scipy.stats import t

from fsdp_lab.config.metrics import DATA_WAIT, FORECAST_ERROR, LOSS_EPS, MEMORY, SPEED
from fsdp_lab.config.nightly import ToleranceConfig
from fsdp_lab.nightly.gate import LOSS, STATUS, Finding, Outcome, judge, judged_columns

TOLERANCE = ToleranceConfig()
SPEED_ERROR = "perf/forecast_error"


def rows(
    speed: Sequence[float] = (1000, 1010, 990), setting: str = "a", status: Sequence[str] = (),
    **metrics: float | None,
) -> list[dict[str, Any]]:  # fmt: skip
    """A row for each speed; `memory`, `loss`, `eps`, `wait`, `error` and `speed_error` are those of all."""
    keys = {"memory": MEMORY, "loss": LOSS, "eps": LOSS_EPS, "wait": DATA_WAIT, "error": FORECAST_ERROR,
            "speed_error": SPEED_ERROR}  # fmt: skip
    values = {"memory": 100.0, "loss": 1.0, "wait": 0.1, "error": 0.0, **metrics}
    same = {keys[name]: value for name, value in values.items()}
    statuses = status or ["finished"] * len(speed)
    return [{"setting": setting, STATUS: one, SPEED: value, **same} for value, one in zip(speed, statuses, strict=True)]


Rows = list[dict[str, Any]]


def found(
    tonight: Rows, *past: Rows, tolerance: ToleranceConfig = TOLERANCE, chance: float = 0.005, machines: str = ""
) -> list[Finding]:
    """What the gate finds; `machines` has an `x` for each past night that ran on another one."""
    other = {place for place, mark in enumerate(machines) if mark == "x"}
    nights = [(f"night {i}", i not in other, pd.DataFrame(night)) for i, night in enumerate(past)]
    return judge(pd.DataFrame(tonight), nights, tolerance, chance)


def bad(findings: Sequence[Finding]) -> list[tuple[str, Outcome]]:
    return [(f.metric, f.outcome) for f in findings if f.is_regression]


def of(findings: Sequence[Finding], metric: str) -> Finding:
    (finding,) = [finding for finding in findings if finding.metric == metric]
    return finding


@pytest.mark.parametrize(
    ("tonight", "before", "expected"),
    [
        (rows(), rows(), []),
        (rows(memory=100.9), rows(), []),  # within the tolerance of 1 %
        (rows(memory=101.1), rows(), [MEMORY]),
        (rows(memory=50.0), rows(), []),  # better
        (rows(loss=1.019), rows(), []),
        (rows(loss=1.021), rows(), [LOSS]),
        (rows(loss=-1.9), rows(loss=-2.0), [LOSS]),  # what is not positive is judged in shares
        (rows(loss=0.0), rows(loss=0.0), []),
        (rows(error=0.009), rows(), []),
        (rows(error=-0.011), rows(), [FORECAST_ERROR]),
        (rows(wait=0.149), rows(), []),
        (rows(wait=0.151), rows(), [DATA_WAIT]),
        (rows((700, 710, 690)), rows(), [SPEED]),
        (rows((860, 870, 880)), rows(), []),  # 13 % slower
        (rows((840,)), rows((1000,)), [SPEED]),  # a single repeat has only the tolerance
        (rows((860,)), rows((1000,)), []),
        (rows((2000, 2100, 2050)), rows(), []),
        (rows((700, 400, 1300)), rows(), []),  # 30 % slower, and repeats that say nothing
        (rows((700, 710, 690), memory=200.0), rows(), [SPEED, MEMORY]),
    ],
)
def test_exactly_what_got_worse_is_named(tonight: Rows, before: Rows, expected: list[str]):
    assert bad(found(tonight, before)) == [(metric, Outcome.regression) for metric in expected]


def test_a_drift_of_three_nights_within_the_tolerance_is_named():
    """The speeds of the nights in which a sleep was planted twice: -13.4 % and -10.3 %."""
    nights = [rows((speed, speed * 1.01, speed * 0.99)) for speed in (262.0, 227.0, 204.0)]
    assert bad(found(nights[1], nights[0])) == [] == bad(found(nights[2], nights[1]))
    drift = of(found(nights[2], *nights[:2]), SPEED)
    assert (drift.outcome, drift.against, drift.nights, drift.before) == (Outcome.drift, "night 0", 2, 262.0)
    assert drift.change == pytest.approx(204 / 262 - 1)
    assert drift.slope == pytest.approx((204 / 262) ** 0.5 - 1, abs=0.01), "of a typical night, as a ratio"
    for metric, levels in (("memory", (100, 100.8, 101.6)), ("loss", (1, 1.015, 1.03))):
        first, second, third = (rows(**{metric: level}) for level in levels)
        assert bad(found(second, first)) == []
        assert [outcome for _, outcome in bad(found(third, first, second))] == [Outcome.drift]


@pytest.mark.parametrize(("share", "beyond"), [(0.9, 2), (0.98, 9)])
def test_a_steady_drift_is_no_noise(share: float, beyond: int):
    """The nights differ by the drift alone, which must not count as how much nights differ by chance.

    beyond: the first night that the tolerance does not cover: 0.9 ** 2 = 0.81 and 0.98 ** 9 = 0.834, below 0.85.
    """
    nights, outcomes = [rows()], []
    for number in range(1, beyond + 1):
        speed = 1000.0 * share**number
        outcomes.append(of(found(rows((speed, speed * 1.01, speed * 0.99)), *nights), SPEED).outcome)
        nights.append(rows((speed, speed * 1.01, speed * 0.99)))
    assert outcomes == [Outcome.ok] * (beyond - 1) + [Outcome.drift]


def test_tolerance_noise_and_change_are_on_one_scale():
    """What noise explains of a loss of speed is less than 100 %, as the loss itself."""
    before, now = (1000.0, 1150.0, 870.0), (708.0, 760.0, 650.0)
    finding = of(found(rows(now), rows(before)), SPEED)
    assert finding.outcome is Outcome.noise
    assert finding.change == pytest.approx(-0.292) and finding.tolerance == pytest.approx(-0.15)
    assert finding.noise is not None and -1 < finding.noise < finding.change
    memory = of(found(rows(memory=120.0), rows()), MEMORY)
    assert (memory.change, memory.tolerance) == (pytest.approx(0.2), pytest.approx(0.01))


def test_a_loss_within_its_rounding_is_no_regression():
    strict = ToleranceConfig(loss=0.0)
    for eps, outcome in ((0.0078, Outcome.rounding), (None, Outcome.regression)):
        assert of(found(rows(loss=1.007, eps=eps), rows(eps=eps), tolerance=strict), LOSS).outcome is outcome
    assert bad(found(rows(loss=1.009, eps=0.0078), rows(), tolerance=strict)) == [(LOSS, Outcome.regression)]


def test_another_machine_lends_no_speed_and_hides_no_slowdown():
    slow = rows((600, 610, 590))
    assert of(found(slow, rows(), rows((70, 70, 70)), machines=" x"), SPEED).against == "night 0"
    assert of(found(slow, rows(), machines="x"), SPEED).outcome is Outcome.unmatched
    assert of(found(rows(memory=200.0), rows(), machines="x"), MEMORY).outcome is Outcome.regression


@pytest.mark.parametrize(("factor", "expected"), [(1.3, []), (0.9, []), (0.8, [SPEED, SPEED_ERROR])])
def test_a_prediction_is_worse_only_where_the_night_is_slower(factor: float, expected: list[str]):
    """Predicted 5 % too long on the night before."""
    tonight = rows((1000 * factor,) * 3, speed_error=1.05 * factor - 1)
    assert [metric for metric, _ in bad(found(tonight, rows((1000,) * 3, speed_error=0.05)))] == expected


def test_the_variance_of_repeats_is_pooled_over_all_nights():
    """By hand: three nights of two repeats, with variances (0.06², 0.02², 0.04²) / 2 of their logarithms."""
    pairs = [rows((1000 * math.exp(d / 2), 1000 * math.exp(-d / 2))) for d in (0.06, 0.02, 0.04)]
    finding = of(found(pairs[2], *pairs[:2]), SPEED)
    expected = 0.2 * -math.log(0.85)  # a fifth of the tolerance, with 20 degrees of freedom
    variance = (20 * expected**2 + (0.06**2 + 0.02**2 + 0.04**2) / 2) / 23
    error = math.sqrt(variance * (1 / 2 + 1 / 2 + 2))  # both nights, and as much again for each
    assert finding.noise == pytest.approx(math.expm1(-t.ppf(1 - 0.005 / 2, 23) * error), rel=1e-6)


@pytest.mark.parametrize("spreads", [(0.02, 0.06, 0.04, 0.03), (0.06, 0.06, 0.06, 0.06)])
@pytest.mark.parametrize("before", [0, 12])
def test_a_slide_of_two_repeats_is_named_by_its_third_night(spreads: Sequence[float], before: int):
    nights = [two(819, 0.04)] * before + [two(819, spreads[0]), two(705, spreads[1])]
    slide = of(found(two(648, spreads[2]), *nights), SPEED)
    assert (slide.outcome, slide.before) == (Outcome.drift, pytest.approx(819))
    assert slide.change == pytest.approx(648 / 819 - 1, abs=0.001)
    assert of(found(two(580, spreads[3]), *nights), SPEED).is_regression, "the third one was no good night"


def two(level: float, spread: float) -> Rows:
    """Two repeats that agree within a share of their median."""
    return [{"setting": "a", STATUS: "finished", SPEED: level * (1 + side * spread / 2)} for side in (-1, 1)]


def test_noise_of_6_percent_names_nothing_in_20_nights():
    """Two repeats of twenty settings that are the same, each judged on its own."""
    rng, nights, named = random.Random(0), list[Rows](), set[str]()
    for _ in range(20):
        settings = [str(number) for number in range(20) for _ in range(2)]
        tonight = [{"setting": each, STATUS: "finished", SPEED: rng.gauss(1000, 60)} for each in settings]
        named |= {finding.setting for finding in found(tonight, *nights) if finding.is_regression}
        nights.append(tonight)
    assert named == set()


def test_nights_that_differ_among_themselves_count_as_noise():
    slow = rows((700, 701, 699))
    assert bad(found(slow, rows((1000, 1001, 999)))) == [(SPEED, Outcome.regression)]
    assert bad(found(slow, *(rows((s, s + 1, s - 1)) for s in (1000, 750, 1100, 800, 1050)))) == []
    steady = [rows((s, s + 1, s - 1)) for s in (1000, 1005, 995, 1002, 998)]
    assert bad(found(slow, *steady)) == [(SPEED, Outcome.regression)]


def test_a_setting_that_no_longer_finishes_is_a_regression():
    broken = rows((1000, 1000, 1000), status=["finished", "oom", "oom"])
    (finding,) = [f for f in found(broken, rows()) if f.is_regression]
    assert (finding.metric, finding.outcome) == (STATUS, Outcome.unfinished)
    assert finding.ended == [["finished", "oom", "oom"], ["finished"] * 3]
    assert bad(found(broken, broken)) == []  # as before
    gone = found(rows(setting="b"), [*rows(), *rows(setting="b")])
    assert [(f.setting, f.outcome) for f in gone if f.is_regression] == [("a", Outcome.unfinished)]
    new = found([*rows(), *rows(setting="c")], rows())
    assert bad(new) == [] and (new[-1].setting, new[-1].outcome) == ("c", Outcome.new)


@pytest.mark.parametrize(
    ("levels", "now"),
    [
        ([100] * 9 + [70], 100),  # faster code for one night, undone the next
        ([100, 100, 100, 70], 140),
    ],
)
def test_a_change_for_good_is_not_taken_for_noise(levels: list[float], now: float):
    for make, metric in (
        (lambda v: rows(memory=v), MEMORY),
        (lambda v: rows(loss=v / 100), LOSS),
        (lambda v: rows((1e5 / v, 1.01e5 / v, 0.99e5 / v)), SPEED),
    ):
        nights = [make(level) for level in levels]
        assert bad(found(make(now), *nights)) == [(metric, Outcome.regression)]
        assert bad(found(nights[-1], *nights)) == []


def test_what_is_not_measured_any_more_is_a_regression():
    (finding,) = [f for f in found(rows(memory=None), rows()) if f.is_regression]
    assert (finding.metric, finding.outcome, finding.before) == (MEMORY, Outcome.lost, 100.0)


def test_the_loss_is_that_of_validation_where_there_is_one():
    trained = {"setting": "a", STATUS: "finished", "train/loss": 2.0}
    both = pd.DataFrame([{**trained, "val/loss": 1.0}])
    assert list(judged_columns(both)[LOSS]) == [1.0]
    assert list(judged_columns(pd.DataFrame([trained]))[LOSS]) == [2.0]


@pytest.mark.parametrize("known", [1, 8])
def test_noise_seldom_raises_an_alarm_and_half_the_speed_mostly(known: int):
    """A hundred settings that are the same, with repeats and nights that differ by 10 % (standard deviation) each."""
    rng = random.Random(0)

    def night(level: float, noise: float) -> Rows:
        levels = [level * rng.gauss(1, noise) for _ in range(100)]
        return [
            {"setting": str(number), STATUS: "finished", SPEED: own * rng.gauss(1, noise)}
            for number, own in enumerate(levels)
            for _ in range(3)
        ]

    alarms = bad(found(night(1000, 0.1), *(night(1000, 0.1) for _ in range(known))))
    seen = bad(found(night(500, 0.03), *(night(1000, 0.03) for _ in range(known))))
    assert len(alarms) <= 3 and len(seen) >= 85, "0.005 of 100, for each of two comparisons, is 1"
