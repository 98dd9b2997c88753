"""What `forecast.keep` measures, of forecasts that are made by hand, and which forecasts it compares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from fsdp_lab.config import ConfigError
from fsdp_lab.config.checks import check_forecast
from fsdp_lab.forecast import keep as of_keep
from fsdp_lab.forecast.capacity import Forecast
from fsdp_lab.forecast.keep import number_kept, ratio_group
from fsdp_lab.forecast.speed.device import DeviceKind
from fsdp_lab.record.reasons import Code, Reason
from fsdp_lab.report.render import reason_text
from tests.forecast.planted import forecast_of, row
from tests.forecast.test_speed import LANGUAGE, sheet
from tests.ranks import config


def passed_over(*arguments: Any, **more: Any) -> dict[int, Reason]:
    return of_keep.passed_over(*arguments, **more)[0]


def left_out(forecasts: Sequence[Forecast], keep: str = "1", names: str = "abcdefghijklmnopqrst") -> set[int]:
    """Return the numbers of those that are not measured; each is a setting of its own unless `names` repeats."""
    return set(passed_over(dict(enumerate(forecasts)), dict(enumerate(names)), keep))


def of_seconds(*seconds: float, **changed: object) -> list[Forecast]:
    return [row("", step_s, **changed).forecast for step_s in seconds]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        ("1", {2, 3, 4}),  # 1.1 s may be as fast as 1.0 s: 1.1 / 1.1 is below 1.0 / 0.9
        ("2", {2, 3, 4}),  # 1.5 / 1.1 is above 1.1 / 0.9
        ("3", {4}),  # 1.6 / 1.1 is below 1.5 / 0.9
        ("40%", {2, 3, 4}),  # two of five
        ("100%", set()),
        ("9", set()),
    ],
)
def test_those_are_kept_that_may_be_as_fast_as_the_last_that_was_asked_for(keep: str, expected: set[int]):
    forecasts = dict(enumerate(of_seconds(1.0, 1.1, 1.5, 1.6, 3.0)))
    reasons = passed_over(forecasts, {number: str(number) for number in forecasts}, keep)
    assert set(reasons) == expected
    if 4 in reasons:
        values = reasons[4].values
        assert (reasons[4].code, values["keep"]) == (Code.too_slow, keep)
        speeds = [values[name] for name in ("speed", "low", "high")]
        assert speeds == pytest.approx([100 / 3, 90 / 3, 110 / 3]), "samples/s"


def test_what_is_common_to_all_predictions_keeps_no_setting():
    """Each is known to ±40 %, which would keep all but the last; their ratios to ±8 %."""
    seconds = (1.0, 1.05, 1.2, 1.5, 3.0)
    alone, related = of_seconds(*seconds, error=0.4), of_seconds(*seconds, error=0.4, relative=0.08)
    assert left_out(alone) == {4}
    assert left_out(related) == {2, 3, 4}
    why = passed_over(dict(enumerate(related)), dict(enumerate("abcde")), "1")[2]
    assert (why.values["share"], why.values["error"]) == (pytest.approx(1 / 1.2), 0.08)
    assert reason_text(why) == (
        "predicted 83.3 samples/s, 83.3% of the last of the most promising. Less than 1 / 1.08 = 92.6% is too "
        "slow: predicted ratios have an error of up to ±8%; forecast.keep=1 does not start it"
    )
    assert left_out([*related[:2], alone[2], *related[3:]]) == {3, 4}, "of one the ratio is not known"


def test_what_is_recommended_is_kept_though_it_is_surely_slower():
    """Of those within report.speed_tolerance the smaller is recommended, because the fastest nearly fills its GPU."""
    rows = [row("root", 1.0, 950, relative=0.01), row("per_block", 1.02, 100, relative=0.01), row("ddp", 3.0)]
    forecasts = {number: each.forecast for number, each in enumerate(rows)}
    names = {number: each.settings[0] for number, each in enumerate(rows)}
    assert set(passed_over(forecasts, names, "1")) == {1, 2}
    assert set(passed_over(forecasts, names, "1", recommended={"per_block"})) == {2}
    forecasts[2] = replace(forecasts[2], speed=None)
    assert set(passed_over(forecasts, names, "1")) == {1}, "what has no prediction is measured"


def test_the_fastest_of_each_global_batch_size_is_kept():
    """What is learned from a sample may differ between batch sizes: the answer need not be in the fastest."""
    forecasts = [*of_seconds(1.0, 2.0, 3.0, samples=10), *of_seconds(1.0, 2.0, samples=1)]
    assert left_out(forecasts) == {1, 2, 4}


def test_a_sweep_says_why_it_skips_nothing():
    forecasts, settings = dict(enumerate(of_seconds(1.0, 1.1, 1.2))), dict(enumerate("abc"))
    assert passed_over(forecasts, settings, "2") == {}
    assert of_keep.passed_over(forecasts, settings, "2")[1] == (
        "nothing is skipped: each of the 3 settings may be one of the 2 fastest, by the errors of their predictions"
    )
    without = {0: replace(forecasts[0], speed=None)}
    assert of_keep.passed_over(without, settings, "1")[1] == "nothing is skipped: no setting has a predicted speed"


def test_repeats_are_one_setting_and_what_cannot_fit_or_has_no_prediction_is_not_ranked():
    forecasts = of_seconds(1.0, 1.0, 5.0, 0.1, 9.0)
    forecasts[3] = replace(forecasts[3], capacity_bytes=50)
    forecasts[4] = replace(forecasts[4], speed=None)
    assert left_out(forecasts, "1", "aabcd") == {2, 3}
    assert left_out(forecasts, "2", "aabcd") == {3}
    why = passed_over({3: forecasts[3]}, {3: "c"}, "1")[3]
    assert (why.code, why.values["needed_bytes"], why.values["capacity_bytes"]) == (Code.does_not_fit, 100, 50)


def test_a_share_is_of_all_settings():
    assert left_out(of_seconds(*(1.5**number for number in range(20))), "20%") == set(range(4, 20))
    assert number_kept("7%", 100) == 7


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        (("tight", "yes", "yes", "yes"), {2, 3}),  # tight is measured beside the fastest of what fits
        (("yes", "yes", "tight", "yes"), {1, 2, 3}),  # nor is it where it cannot be as fast
        (("tight", "tight", "tight", "no"), {1, 2, 3}),  # where nothing fits it is ranked alone
        (("no", "yes", "yes", "yes"), {0, 2, 3}),
    ],
)
def test_what_is_tight_takes_no_place_of_what_fits(verdicts: tuple[str, ...], expected: set[int]):
    assert left_out([forecast_of(verdict, 2.0**n) for n, verdict in enumerate(verdicts)]) == expected


OURS = ("sharding=per_block", "precision=fp32")


@pytest.mark.parametrize(
    ("words", "workers", "same"),
    [
        (["sharding=root", "precision=bf16", "training.global_batch_size=32", "data.num_train=64"], 8, True),
        (["model.num_layers=24"], 8, False),
        (["model=mlp"], 8, False),
        (["compile=true"], 8, False),
        (["offload=cpu"], 8, False),
        ([], 16, False),
    ],
)
def test_a_group_is_of_one_model_on_so_many_workers(words: list[str], workers: int, same: bool):
    gpu = sheet("h100_sxm")
    mine = ratio_group(config(*OURS), 8, gpu)
    assert (ratio_group(config(*OURS, *words), workers, gpu) == mine) is same


def test_the_figures_of_a_device_separate_groups_and_on_a_cpu_nothing_is_offloaded():
    gpu = sheet("h100_sxm")
    cpu = replace(gpu, kind=DeviceKind.cpu)
    assert ratio_group(config(), 8, gpu) != ratio_group(config(), 8, replace(gpu, launch_s=1e-9))
    assert ratio_group(config("sharding=root", "offload=cpu"), 8, cpu) == ratio_group(config(), 8, cpu)
    longer = [*LANGUAGE, "data.seq_len=32"]
    assert ratio_group(config(*LANGUAGE), 8, gpu) != ratio_group(config(*longer), 8, gpu)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["forecast.keep='5'"], r"forecast.device=<a100_40gb\|"),
        (["forecast.keep='5'", "forecast.device=h100_sxm", "forecast.enabled=false"], "forecast.enabled=true"),
    ],
)
def test_a_keep_without_speeds_or_forecasts_is_refused(words: list[str], named: str):
    """A sweep refuses it earlier, in words of its own: `tests/messages.txt` has those."""
    with pytest.raises(ConfigError, match=named):
        check_forecast(trial := config(*words), trial.forecast.keep)
