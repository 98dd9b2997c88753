"""The error of ratios of predictions."""

from __future__ import annotations

from itertools import combinations

import pytest

from fsdp_lab.forecast.speed.device import KnownError
from fsdp_lab.forecast.speed.refine import pair_error

RATIOS = [0.9, 0.95, 1.0, 1.0, 1.05, 1.1, 1.2]


def test_it_is_that_of_each_pair_and_a_common_factor_changes_nothing():
    result = pair_error([RATIOS])
    assert result is not None
    errors = sorted(max(a, b) / min(a, b) - 1 for a, b in combinations(RATIOS, 2))
    assert result.median == pytest.approx(errors[10]) and result.p90 == pytest.approx(errors[18])
    doubled = pair_error([[2 * ratio for ratio in RATIOS]])
    assert doubled is not None and doubled.p90 == pytest.approx(result.p90)


def test_only_settings_of_one_model_are_compared():
    exact = [[level] * 7 for level in (0.5, 1.0, 3.0)]
    assert pair_error(exact) == KnownError(0.01, 0.01), "no error is below a hundredth"
    assert pair_error([[level for level, *_ in exact] * 3]) != pair_error(exact)


def test_few_pairs_report_nothing():
    assert pair_error([]) is None and pair_error([RATIOS[:6]]) is None and pair_error([[1.0]] * 100) is None
