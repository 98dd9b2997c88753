"""Trials that were made up with known factors, and what is found of them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from fsdp_lab.forecast.speed.costs import seconds
from fsdp_lab.forecast.speed.device import Basis, Factors, KnownError
from fsdp_lab.forecast.speed.predict import Parts, predict
from fsdp_lab.forecast.speed.program import Kind, Stream
from fsdp_lab.forecast.speed.refine import Observation, refine
from tests.speed.test_costs import ROUND, gather, operator


def observation(setting: str, parts: Parts, factors: Factors, noise: float = 1.0) -> Observation:
    shown = (1 - factors.overlap) * parts.hidden
    seconds = factors.compute * parts.compute + factors.communication * parts.communication + parts.launch + shown
    return Observation(setting, parts, seconds * noise, "2.15.0", "d")


def observations(count: int, factors: Factors, spread: float = 0.0) -> list[Observation]:
    draw = random.Random(0)
    return [
        observation(
            str(number),
            Parts(draw.uniform(0.1, 1), draw.uniform(0, 1), 0.01, draw.uniform(0, 0.5)),
            factors,
            1 + draw.uniform(-spread, spread),
        )
        for number in range(count)
    ]


def test_many_trials_report_the_factors():
    true = Factors(compute=1.3, communication=0.8, overlap=0.6)
    refined = refine(ROUND, observations(40, true))
    assert refined.basis is Basis.trials and refined.factors.settings == 40
    assert refined.factors.compute == pytest.approx(1.3, rel=0.02)
    assert refined.factors.communication == pytest.approx(0.8, rel=0.02)
    assert refined.factors.overlap == pytest.approx(0.6, abs=0.03)


def test_without_trials_nothing_changes():
    assert refine(ROUND, []) is ROUND


def test_one_trial_moves_the_factors_part_of_the_way():
    """The half of what compute alone would explain goes to communication and overlap, and some is left."""
    (one,) = observations(1, Factors(compute=2.0))
    refined = refine(ROUND, [one])
    assert 1.0 < refined.factors.compute < 2.0
    assert refined.error == ROUND.error, "one trial says nothing of how far off others are"


def test_the_error_is_that_of_settings_which_the_factors_have_not_seen():
    known = replace(ROUND, error=KnownError(0.1, 0.3))
    noisy = refine(known, observations(40, Factors(1.2, 1.1), spread=0.3))
    assert 0.15 < noisy.error.p90 <= 0.35
    exact = refine(known, observations(40, Factors(1.2, 1.1)))
    assert exact.error.p90 == pytest.approx(0.15), "at least half of what it was"
    assert exact.error_elsewhere == exact.error


def test_a_level_that_all_trials_share_is_no_error_of_their_ratios():
    """Launches are not corrected: where they take long, all trials are off by the same factor."""
    slow = [
        replace(one, parts=Parts(0.0, 0.0, one.parts.compute, 0.0), measured_s=2 * one.parts.compute)
        for one in observations(12, Factors())
    ]
    refined = refine(replace(ROUND, error=KnownError(0.01, 0.02)), slow)
    assert refined.relative is not None and refined.relative.p90 < refined.error.p90 / 2
    few = refine(replace(ROUND, relative=KnownError(0.1, 0.2)), slow[:3])
    assert few.relative == KnownError(0.1, 0.2), "as its file has it"


def test_runs_of_one_setting_count_once():
    first, *_ = observations(1, Factors())
    again = [replace(first, measured_s=first.measured_s * factor) for factor in (0.9, 1.0, 5.0)]
    assert refine(ROUND, again).factors.settings == 1
    assert refine(ROUND, again) == refine(ROUND, [first])


def test_trials_scale_compute_and_communication_apart():
    sent = replace(gather(8e9, 2), stream=Stream.gather, writes=(1,))
    product = operator(Kind.matmul, flops=5e11, dtype="float32", reads=(1,))
    corrected = replace(ROUND, factors=Factors(compute=2.0, communication=3.0))
    assert seconds(product, corrected) == pytest.approx(2 * seconds(product, ROUND))
    assert seconds(sent, corrected) == pytest.approx(3 * seconds(sent, ROUND))
    before, after = (predict([sent, product], device).parts for device in (ROUND, corrected))
    assert before is not None and after is not None
    assert vars(after) == pytest.approx(vars(before)), "what trials are compared with does not depend on trials"
    assert before.compute == pytest.approx(0.1) and before.communication == pytest.approx(0.04)
