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
from fsdp_lab.nightly.gate import (
    LOSS,
    STATUS,
    Finding,
    Night,
    Outcome,
    Verdict,
    judge,
    judged_columns,
    since_accepted,
)

TOLERANCE = ToleranceConfig()
SPEED_ERROR = "perf/forecast_error"


def rows(
    speed: Sequence[float] = (1000, 1010, 990), setting: str = "a", status: Sequence[str] = ("finished",) * 3,
    **metrics: float | None,
) -> list[dict[str, Any]]:  # fmt: skip
    """A row for each speed; the metrics below are those of all."""
    keys = {"memory": MEMORY, "loss": LOSS, "eps": LOSS_EPS, "wait": DATA_WAIT, "error": FORECAST_ERROR,
            "speed_error": SPEED_ERROR}  # fmt: skip
    values = {"memory": 100.0, "loss": 1.0, "wait": 0.1, "error": 0.0, **metrics}
    same = {"setting": setting, **{keys[name]: value for name, value in values.items()}}
    return [{STATUS: one, SPEED: value, **same} for value, one in zip(speed, status, strict=False)]


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
        (rows(wait=0.151), rows(), [DATA_WAIT]),
        (rows((700, 710, 690)), rows(), [SPEED]),
        (rows((860, 870, 880)), rows(), []),  # 13 % slower
        (rows((840,)), rows((1000,)), [SPEED]),  # a single repeat has only the tolerance
        (rows((700, 400, 1300)), rows(), []),  # 30 % slower, and repeats that say nothing
        (rows((700, 710, 690), memory=200.0), rows(), [SPEED, MEMORY]),
        # predicted 5 % too long; that the night is faster, or as slow as is tolerated, is no worse prediction
        (rows((1300,) * 3, speed_error=0.365), rows((1000,) * 3, speed_error=0.05), []),
        (rows((800,) * 3, speed_error=-0.16), rows((1000,) * 3, speed_error=0.05), [SPEED, SPEED_ERROR]),
    ],
)
def test_exactly_what_got_worse_is_named(tonight: Rows, before: Rows, expected: list[str]):
    other = rows(setting="b")  # as before
    named = [(f.setting, *one) for f in found([*other, *tonight], [*before, *other]) for one in bad([f])]
    assert named == [("a", metric, Outcome.regression) for metric in expected]


@pytest.mark.parametrize(("share", "beyond"), [(0.9, 2), (0.97, 6)])
def test_a_steady_drift_is_no_noise(share: float, beyond: int):
    """The nights differ by the drift alone, which must not count as how much nights differ by chance.

    beyond: the first night that the tolerance does not cover: 0.9 ** 2 = 0.81 and 0.97 ** 6 = 0.833, below 0.85.
    """
    nights, outcomes = [rows()], []
    for number in range(1, beyond + 1):
        tonight = rows([1000 * share**number * one for one in (1, 1.01, 0.99)])
        outcomes.append(of(found(tonight, *nights), SPEED).outcome)
        nights.append(tonight)
    assert outcomes == [Outcome.ok] * (beyond - 1) + [Outcome.drift]


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


@pytest.mark.parametrize("chance", [0.005, 0.05])
def test_the_variance_of_repeats_is_pooled_over_all_nights(chance: float):
    """By hand: three nights of two repeats, with variances (0.06², 0.02², 0.04²) / 2 of their logarithms."""
    pairs = [rows((1000 * math.exp(d / 2), 1000 * math.exp(-d / 2))) for d in (0.06, 0.02, 0.04)]
    finding = of(found(pairs[2], *pairs[:2], chance=chance), SPEED)
    expected = 0.2 * -math.log(0.85)  # a fifth of the tolerance, with 20 degrees of freedom
    variance = (20 * expected**2 + (0.06**2 + 0.02**2 + 0.04**2) / 2) / 23
    error = math.sqrt(variance * (1 / 2 + 1 / 2 + 2))  # both nights, and as much again for each
    assert finding.noise == pytest.approx(math.expm1(-t.ppf(1 - chance / 2, 23) * error), rel=1e-6)


def test_from_five_nights_on_how_much_nights_differ_is_known():
    """Tonight is 33 % slower, which is no alarm where nights differed by as much before."""
    for levels, outcome in (((1000, 750, 1100, 800, 1050), Outcome.noise), ((1050,) * 5, Outcome.regression)):
        nights = [rows([level * share for share in (1, 1.01, 0.99)]) for level in levels]
        assert of(found(rows((700, 707, 693)), *nights), SPEED).outcome is outcome


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


def test_a_setting_that_no_longer_finishes_is_a_regression():
    broken = rows((1000, 1000, 1000), status=["finished", "oom", "oom"])
    (finding,) = [f for f in found(broken, rows()) if f.is_regression]
    assert (finding.metric, finding.outcome) == (STATUS, Outcome.unfinished)
    assert finding.ended == [["finished", "oom", "oom"], ["finished"] * 3]
    assert bad(found(broken, broken)) == []  # as before
    assert bad(found(rows(setting="b"), [*rows(), *rows(setting="b")])) == [(STATUS, Outcome.unfinished)]
    assert bad(found([*rows(), *rows(setting="c")], rows())) == []  # a new one
    assert bad(found(rows(memory=None), rows())) == [(MEMORY, Outcome.lost)]  # not measured any more


@pytest.mark.parametrize(
    ("verdicts", "compared"),
    [
        ("good accepted regression good accepted good incomplete failed regression", [4, 5]),
        ("good regression good failed", [0, 2]),
        ("regression incomplete", []),
    ],
)
def test_a_night_is_compared_with_good_ones_since_the_last_accepted(verdicts: str, compared: list[int]):
    nights = [Night(str(number), number, Verdict(verdict)) for number, verdict in enumerate(verdicts.split())]
    assert [night.begun for night in since_accepted(nights)] == compared


def test_the_loss_of_a_night_is_of_validation_if_there_is_one():
    row = {"setting": "a", "train/loss": 1.0, "val/loss": 2.0}
    assert judged_columns(pd.DataFrame([row]))[LOSS].item() == 2.0
    assert judged_columns(pd.DataFrame([{**row, "val/loss": math.nan}]))[LOSS].item() == 1.0


def test_one_odd_night_is_not_taken_for_noise():
    """Code that was better until the next night undoes it: the nights before do not excuse it. A speed of one night may
    be luck, and counts only when the next night confirms it; no memory is."""
    better = rows((1430, 1440, 1420), memory=70.0)
    assert bad(found(rows(), *[rows()] * 9, better)) == [(MEMORY, Outcome.regression)]
    both = [(SPEED, Outcome.regression), (MEMORY, Outcome.regression)]
    assert bad(found(rows(), *[rows()] * 9, better, better)) == both


@pytest.mark.parametrize("before", [1, 4, 12])
def test_one_lucky_night_makes_no_later_one_red(before: int):
    """It is 28 % faster. Nights that are as slow as 15 % below all others are named as ever."""
    nights = [*[rows()] * before, rows((1280, 1290, 1270))]
    for _ in range(10):
        assert bad(found(rows(), *nights)) == []
        nights.append(rows())
    assert of(found(rows((1280, 1290, 1270)), *nights), SPEED).outcome is Outcome.better
    assert bad(found(rows((820, 830, 810)), *nights)) == [(SPEED, Outcome.regression)]


def test_a_slide_within_the_tolerance_is_a_warning_before_it_is_a_drift():
    """0.3 % a night, with noise of 1 % between nights: from the 22nd on they have lost 6 % of 15 that are tolerated."""

    def outcome(slope: float, number: int, seed: int) -> Outcome:
        rng = random.Random(seed)
        levels = [1000 * (1 - slope) ** night * rng.gauss(1, 0.01) for night in range(number)]
        *nights, tonight = (rows([level * share for share in (1, 1.01, 0.99)]) for level in levels)
        return of(found(tonight, *nights), SPEED).outcome

    assert (outcome(0.003, 22, 0), outcome(0.0, 22, 0)) == (Outcome.slides, Outcome.ok)
    assert outcome(0.02, 6, 0) is Outcome.ok, "of few nights"


@pytest.mark.parametrize("known", [1, 8])
def test_noise_seldom_raises_an_alarm_and_half_the_speed_mostly(known: int):
    """A hundred settings that are the same, with repeats and nights that differ by 10 % (standard deviation) each."""
    rng = random.Random(0)

    def night(level: float, noise: float) -> Rows:
        levels = {str(number): level * rng.gauss(1, noise) for number in range(100)}
        own = [(setting, own * rng.gauss(1, noise)) for setting, own in levels.items() for _ in range(3)]
        return [{"setting": setting, STATUS: "finished", SPEED: speed} for setting, speed in own]

    alarms = bad(found(night(1000, 0.1), *(night(1000, 0.1) for _ in range(known))))
    seen = bad(found(night(500, 0.03), *(night(1000, 0.03) for _ in range(known))))
    assert len(alarms) <= 3 and len(seen) >= 85, "0.005 of 100, for each of two comparisons, is 1"
