"""Numbers in sentences."""

from __future__ import annotations

import pytest

from fsdp_lab.config.wording import count, duration, four_digits, significant, time_left


@pytest.mark.parametrize(("number", "text"), [(0, "0 trials"), (1, "1 trial"), (2, "2 trials"), (1254, "1,254 trials")])
def test_one_trial_is_no_trials(number: int, text: str):
    assert count(number, "trial") == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (59.4, "59 s"), (59.6, "1 min 0 s"), (125, "2 min 5 s"), (3599.7, "1 h 0 min"),
     (11400, "3 h 10 min"), (-3, "0 s")],
)  # fmt: skip
def test_times_have_two_units_at_most(seconds: float, text: str):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(8.8, "8.80"), (0.012345, "0.0123"), (9.996, "10.0"), (99.96, "100"), (123.4, "123"), (14523.4, "14,523"),
     (0, "0"), (-2.719, "-2.72")],
)  # fmt: skip
def test_numbers_have_three_significant_digits(value: float, text: str):
    assert significant(value) == text


def test_the_time_left_is_as_long_as_what_is_done_has_taken():
    assert time_left(2, 8, 30) == "about 1 min 30 s left"
    assert time_left(8, 8, 30) == "" and time_left(0, 8, 30) == ""


@pytest.mark.parametrize(
    ("value", "text"), [(10070.4, "10,070"), (1018, "1,018"), (999.96, "1,000"), (75.831, "75.83"), (103.4, "103.4")]
)
def test_large_figures_have_no_exponent(value: float, text: str):
    assert four_digits(value) == text
