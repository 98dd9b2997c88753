"""The gate on numbers of which it can be said by hand, and on noise of which the share of alarms is known."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest
from scipy.stats import ttest_ind

from fsdp_lab.config.nightly import ToleranceConfig
from fsdp_lab.metrics import FORECAST_ERROR, MEMORY, MIB, SPEED
from fsdp_lab.nightly.gate import LOSS, Finding, Result, compare, table
from fsdp_lab.nightly.read_study import read_study
from fsdp_lab.nightly.verdict import without_speed

TOLERANCE = ToleranceConfig()


def result(
    speed: Sequence[float] = (1000, 1010, 990), memory: float = 100.0, loss: float = 1.0, error: float = 0.0
) -> Result:
    count = len(speed)
    values = {SPEED: list(speed), MEMORY: [memory * MIB] * count, LOSS: [loss] * count, FORECAST_ERROR: [error] * count}
    return Result(["finished"] * count, values)


def judged(tonight: Result, baseline: Result, earlier: Sequence[Result] = ()) -> list[Finding]:
    both = {"a": tonight, "b": result()}, {"a": baseline, "b": result()}
    return compare(*both, [{"a": e} for e in earlier], TOLERANCE, 0.005)


def regressions(findings: Sequence[Finding]) -> list[tuple[str, str]]:
    return [(f.setting, f.metric) for f in findings if f.regression]


@pytest.mark.parametrize(
    ("tonight", "expected"),
    [
        (result(), []),
        (result(memory=100.9), []),  # within the tolerance of 1 %
        (result(memory=101.1), [("a", "peak MiB")]),
        (result(memory=50), []),  # better
        (result(loss=1.019), []),
        (result(loss=1.021), [("a", "final loss")]),
        (result(error=0.009), []),
        (result(error=-0.011), [("a", "forecast error")]),
        (result((700, 710, 690)), [("a", "samples/s")]),
        (result((860, 870, 880)), []),  # 13 % slower
        (result((2000, 2100, 2050)), []),
        (result((700, 400, 1300)), []),  # 30 % slower, and repeats that say nothing
        (result((700, 710, 690), memory=200), [("a", "peak MiB"), ("a", "samples/s")]),
    ],
)
def test_exactly_what_got_worse_is_named(tonight: Result, expected: list[tuple[str, str]]):
    assert regressions(judged(tonight, result())) == expected


def with_prediction(factor: float, speed: float = 1000.0) -> Result:
    """Three repeats so many times as fast as the baseline, whose step was predicted 5 % too long."""
    outcome = result((speed * factor,) * 3)
    return Result(outcome.statuses, {**outcome.values, "perf/forecast_error": [1.05 * factor - 1] * 3})


@pytest.mark.parametrize(
    ("factor", "expected"),
    [(1.0, []), (1.3, []), (0.9, []), (0.8, [("a", "samples/s"), ("a", "speed forecast error")])],
)
def test_a_prediction_is_worse_where_the_night_is_slower_and_not_where_it_is_faster(
    factor: float, expected: list[tuple[str, str]]
):
    assert regressions(judged(with_prediction(factor), with_prediction(1.0))) == expected


def test_a_prediction_is_a_speed_and_not_judged_where_speed_is_not():
    busy = without_speed({"a": with_prediction(0.5)})
    findings = compare(busy, {"a": with_prediction(1.0)}, [], TOLERANCE, 0.005, "others used the cores")
    assert regressions(findings) == []
    assert [f.note for f in findings if "others used" in f.note] == ["not judged: others used the cores"]


def test_the_noise_is_that_of_welchs_test():
    before, now = (1000.0, 1100.0, 900.0), (700.0, 760.0, 640.0)
    logs = [[math.log(v) for v in values] for values in (before, now)]  # noise is a factor
    p = ttest_ind(*logs, equal_var=False, alternative="greater").pvalue
    alike = [{"a": result((1000.0,))}] * 4  # nights that do not differ
    for significance, expected in ((p * 1.02, [("a", "samples/s")]), (p * 0.98, [])):
        outcome = compare({"a": result(now)}, {"a": result(before)}, alike, TOLERANCE, significance)
        assert regressions(outcome) == expected, p


def test_nights_that_differ_among_themselves_count_as_noise():
    slow = result((700, 701, 699))
    assert regressions(judged(slow, result((1000, 1001, 999)))) == [("a", "samples/s")]
    nights = [result((s, s + 1, s - 1)) for s in (1000, 750, 1100, 800, 1050)]
    assert regressions(judged(slow, result((1000, 1001, 999)), nights)) == []
    steady = [result((s, s + 1, s - 1)) for s in (1000, 1005, 995, 1002, 998)]
    assert regressions(judged(slow, result((1000, 1001, 999)), steady)) == [("a", "samples/s")]


def test_a_single_repeat_has_only_the_tolerance():
    assert regressions(judged(result((840,)), result((1000,)))) == [("a", "samples/s")]
    assert regressions(judged(result((860,)), result((1000,)))) == []


@pytest.mark.parametrize(
    ("tonight", "limit"), [(result(loss=1.5), "2 %"), (result(error=0.5), "0.01")]
)  # of the first the tolerance is a ratio, of the second a difference
def test_a_note_has_the_tolerance_in_its_unit(tonight: Result, limit: str):
    (finding,) = [finding for finding in judged(tonight, result()) if finding.regression]
    assert finding.note.startswith(f"worse by more than {limit}")


def test_a_setting_that_does_not_finish_as_before_is_a_regression():
    broken = Result(["finished", "oom", "oom"], result((1000,)).values)
    (finding,) = [f for f in judged(broken, result()) if f.regression]
    assert (finding.setting, finding.metric, finding.baseline, finding.tonight) == (
        "a", "result", "3 of 3 finished", "1 of 3 finished (oom)",
    )  # fmt: skip
    assert regressions(judged(broken, broken)) == []  # as before
    gone = compare({}, {"a": result()}, [], TOLERANCE, 0.005)
    assert regressions(gone) == [("a", "result")]
    new = compare({"a": result(), "c": result()}, {"a": result()}, [], TOLERANCE, 0.005)
    assert regressions(new) == [] and new[-1].setting == "c"


@pytest.mark.parametrize(
    ("levels", "now"),
    [
        ([100] * 9 + [70], 100),  # faster code for one night, undone the next
        ([100, 100, 100, 70], 140),
        ([100] * 9 + [150], 220),  # accepted, and then worse again
        ([100] * 5 + [150] * 5, 220),
    ],
)
def test_a_change_for_good_is_not_taken_for_noise(levels: list[float], now: float):
    for make, metric in (
        (lambda v: result(memory=v), "peak MiB"),
        (lambda v: result(loss=v / 100), "final loss"),
        (lambda v: result((1e5 / v, 1.01e5 / v, 0.99e5 / v)), "samples/s"),
    ):
        nights = [make(level) for level in levels]
        assert regressions(judged(make(now), nights[-1], nights)) == [("a", metric)]
        assert regressions(judged(nights[-1], nights[-1], nights)) == []


def test_what_is_not_measured_any_more_is_a_regression():
    blind = Result(["finished"] * 3, {**result().values, MEMORY: []})
    (finding,) = [f for f in judged(blind, result()) if f.regression]
    assert (finding.metric, finding.baseline, finding.tonight) == ("peak MiB", "100.00", "none")
    # what was not to be judged has no key at all
    unjudged = Result(["finished"] * 3, {k: v for k, v in result().values.items() if k != SPEED})
    assert regressions(judged(unjudged, result())) == []


@pytest.mark.parametrize("known", [1, 2, 6])
def test_noise_alone_raises_an_alarm_less_often_than_it_may(known: int):
    """Settings that are the same, with repeats and nights that differ by 10 % (standard deviation) each."""
    rng = random.Random(0)

    def noisy_night() -> Result:
        level = 1000 * rng.gauss(1, 0.1)
        return result([level * rng.gauss(1, 0.1) for _ in range(3)])

    alarms = 0
    for _ in range(300):
        earlier = [noisy_night() for _ in range(known)]
        alarms += bool(
            regressions(
                compare({"a": noisy_night()}, {"a": earlier[-1]}, [{"a": e} for e in earlier], TOLERANCE, 0.005)
            )
        )
    assert alarms <= 5  # 0.005 of 300 is 1.5
    # and it is not deaf: half the speed is seen, most times
    seen = 0
    for _ in range(100):
        earlier = [result([1000 * rng.gauss(1, 0.03) for _ in range(3)]) for _ in range(known)]
        slow = result([500 * rng.gauss(1, 0.03) for _ in range(3)])
        seen += bool(
            regressions(compare({"a": slow}, {"a": earlier[-1]}, [{"a": e} for e in earlier], TOLERANCE, 0.005))
        )
    assert seen >= 85


def test_the_table_has_the_regressions_first():
    rows = table(judged(result(memory=120), result())).splitlines()
    assert "| `a` | peak MiB | 100.00 | 120.00 | +20.0 % | **regression**: worse by more than 1 %" in rows[2]
    assert len(rows) == 2 + 2 * 4


@pytest.mark.parametrize(
    ("words", "workers"), [((), 0), (("data.loader_workers=3",), 3), (("data.loader_workers=null",), 0)]
)
def test_a_study_has_the_number_of_loader_workers(fake_nvml: Callable[..., None], words: tuple[str, ...], workers: int):
    """Nights before null wrote 0 on a CPU, and can stay the baseline."""
    fake_nvml(gpus=0)
    assert read_study(["nightly.notify.url=null", *words]).settings["data.loader_workers"] == workers
