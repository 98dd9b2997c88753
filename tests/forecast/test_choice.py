"""What is chosen among forecasts made by hand: what fits, what is recommended, and what `forecast.keep` measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from fsdp_lab.forecast.answer import answers
from fsdp_lab.forecast.capacity import FULL_ERROR, GIB, Forecast, Host, NoForecast, on_capacity
from fsdp_lab.forecast.keep import number_kept, passed_over, ratio_group
from fsdp_lab.forecast.speed.device import on_network
from fsdp_lab.forecast.table import Row, forecast_table, in_order
from fsdp_lab.forecast.words import say
from fsdp_lab.record.reasons import Code
from tests.forecast.planted import forecast_of, row, sheet
from tests.ranks import config


@pytest.mark.parametrize(
    ("forecast", "fits", "unsure"),
    [
        (forecast_of("yes"), True, False),
        (forecast_of("unsure"), False, True),  # 900 active and 100 beside the allocator: what it caches is too much
        (forecast_of("no"), False, False),
        (forecast_of("unsure", capacity=None), None, False),
        (forecast_of("yes", capacity=945), True, False),  # 900 needed, 850 without the cache: 10 % are left
        (forecast_of("yes", capacity=944), False, True),
        (forecast_of("yes", capacity=849), False, False),
        (Forecast(False, 8, {"device": {"total": 1000}}, capacity_bytes=1000), True, False),  # a CPU's is exact
        (Forecast(False, 8, {"device": {"total": 1001}}, capacity_bytes=1000), False, False),  # a CPU caches nothing
        (Forecast(True, 8, capacity_bytes=1000, error=NoForecast("cancelled")), None, False),
    ],
)
def test_what_may_fit_is_unsure(forecast: Forecast, fits: bool, unsure: bool):
    assert (forecast.fits, forecast.unsure) == (fits, unsure)


def test_only_what_fits_is_recommended():
    made = (("ddp", "no", 0.5), ("root", "unsure", 1.0), ("per_layer", "unsure", 2.5), ("per_block", "yes", 2.0))
    rows = [Row([name], forecast_of(verdict, step_s), None, 64) for name, verdict, step_s in made]
    full = Row(["size_based"], forecast_of("yes", 0.5, capacity=944), None, 64)  # but for less than 10 %
    (answer,) = answers([*rows, full], ["sharding"], 0.0)
    assert answer.best and answer.best.settings == ["per_block"]
    assert set(answer.recommendation.why_not) == {
        f"sharding={name}" for name in ("ddp", "root", "per_layer", "size_based")
    }
    rows = in_order(rows)
    assert [r.settings[0] for r in rows] == ["per_block", "root", "per_layer", "ddp"]
    (fits,) = [column.cells for column in forecast_table(rows, ["sharding"]).columns if column.name == "fits"]
    assert fits == ["yes", "unsure", "unsure", "no"]


def offloaded(gib: int | None, workers: int = 8) -> Forecast:
    """One that fits its GPU, and whose workers need 100 GiB each on a host of so many GiB."""
    forecast = forecast_of("yes", 2.0)
    peaks = forecast.peaks | {"host": {"total": 100 * GIB, "param": 60 * GIB}}
    return on_capacity(replace(forecast, peaks=peaks), 1000, Host(None if gib is None else gib * GIB, workers))


@pytest.mark.parametrize(
    ("forecast", "fits", "named"),
    [
        (offloaded(800), True, ""),
        (offloaded(799), False, "1 offloaded setting that fit no host: 8 workers of a host need up to 800 GiB, and it"),
        (offloaded(799, workers=4), True, ""),  # the others are on another host
        (offloaded(None), True, "1 offloaded setting not checked: 8 workers of a host need up to 800 GiB"),
    ],
)
def test_all_workers_of_a_host_have_to_fit_its_memory_if_known(forecast: Forecast, fits: bool, named: str):
    assert (forecast.fits, forecast.unsure) == (fits, False)
    other = Row(["none"], forecast_of("yes", 3.0), None, 64)
    (answer,) = answers([Row(["cpu"], forecast, None, 64), other], ["offload"], 0.0)
    assert answer.best and answer.best.settings == (["cpu"] if fits else ["none"])
    assert set(answer.recommendation.why_not) == (set() if fits else {"offload=cpu"})
    lines = say("host", [forecast])
    assert lines == [] if not named else lines[0].startswith(f"host memory: {named}")


def test_a_gpu_without_room_may_be_slower_than_predicted():
    """Of 950 bytes 900 are needed: by the error of published steps that were so full."""
    speed = row("", 1.0, relative=0.1).forecast.speed
    full, on_cpu = (replace(forecast_of("yes"), speed=speed, cuda=cuda) for cuda in (True, False))
    slower = on_capacity(full, 950).speed
    assert speed and slower and slower.high_s == pytest.approx(max(1 / 0.9, 1.0 / (1 - FULL_ERROR)))
    assert (slower.low_s, slower.relative) == (speed.low_s, None)
    assert on_capacity(full, 1000).speed == speed
    assert on_capacity(on_cpu, 950).speed == speed, "it has no allocator that retries"


FAST, LARGE = row("root", 1.2, 300), row("ddp", 1.0, fits=False)


@pytest.mark.parametrize(
    ("rows", "best", "tied", "decided"),
    [
        ([LARGE, FAST, row("per_block", 1.21), row("other", 2.0)], "root", ["per_block"], "speed"),
        ([FAST, row("per_layer", 1.2003, 200)], "per_layer", ["root"], "memory"),  # 0.03 % are nothing
        # 5 % apart: the ranges overlap, but of one model the ratio is known to 2 %
        ([row("root", 1.0, relative=0.02), row("ddp", 1.05, relative=0.02)], "root", [], None),
        ([row("root", 1.0, relative=0.02), row("ddp", 1.05, group="another")], "root", ["ddp"], "speed"),
        # the fastest needs over 90 %: it is not sure to fit
        ([LARGE, row("root", 1.2, 901), row("per_block", 1.21, 100)], "per_block", [], None),
    ],
)
def test_the_fastest_that_fits_or_of_equals_the_smallest_is_best(
    rows: list[Row], best: str, tied: list[str], decided: str | None
):
    (answer,) = answers(rows, ["sharding"], 0.03)
    made = answer.recommendation
    assert made.setting is not None and made.setting.values == {"sharding": best}
    assert ([each.name.partition("=")[2] for each in made.tied], made.tie_break) == (tied, decided)


def left_out(forecasts: Sequence[Forecast], keep: str = "1", names: str = "abcdefghijklmnopqrst") -> set[int]:
    """Return the numbers of those that are not measured; each is a setting of its own unless `names` repeats."""
    return set(passed_over(dict(enumerate(forecasts)), dict(enumerate(names)), keep)[0])


def of_seconds(*seconds: float, **changed: object) -> list[Forecast]:
    return [row("", step_s, **changed).forecast for step_s in seconds]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        ("1", {2, 3, 4}),  # 1.1 s may be as fast as 1.0 s: 1.1 / 1.1 is below 1.0 / 0.9
        ("2", {2, 3, 4}),  # 1.5 / 1.1 is above 1.1 / 0.9
        ("3", {4}),  # 1.6 / 1.1 is below 1.5 / 0.9
        ("40%", {2, 3, 4}),  # two of five
        ("9", set()),
    ],
)
def test_keep_keeps_what_may_be_as_fast_as_the_last_asked_for(keep: str, expected: set[int]):
    forecasts = dict(enumerate(of_seconds(1.0, 1.1, 1.5, 1.6, 3.0)))
    reasons, note = passed_over(forecasts, {number: str(number) for number in forecasts}, keep)
    assert set(reasons) == expected and number_kept("7%", 100) == 7 and number_kept("41%", 5) == 3
    assert expected or "nothing is skipped: 5 settings have a predicted speed" in str(note)
    if 4 in reasons:
        speeds = [reasons[4].values[name] for name in ("speed", "low", "high")]
        assert reasons[4].code is Code.too_slow and speeds == pytest.approx([100 / 3, 90 / 3, 110 / 3]), "samples/s"


def of_verdicts(*verdicts: str) -> list[Forecast]:
    return [forecast_of(verdict, 2.0**number) for number, verdict in enumerate(verdicts)]


FIVE = (1.0, 1.05, 1.2, 1.5, 3.0)


@pytest.mark.parametrize(
    ("forecasts", "expected"),
    [
        # each is known to 40 %, which would keep all but the last; their ratios to 8 %
        (of_seconds(*FIVE, error=0.4), {4}),
        (of_seconds(*FIVE, error=0.4, relative=0.08), {2, 3, 4}),
        # the fastest of each global batch size: what is learned from a sample may differ
        ([*of_seconds(1.0, 2.0, 3.0, samples=10), *of_seconds(1.0, 2.0, samples=1)], {1, 2, 4}),
        # what is unsure is measured beside the fastest of what fits, if it can be as fast; where nothing fits, alone
        (of_verdicts("unsure", "yes", "yes", "yes"), {2, 3}),
        (of_verdicts("yes", "yes", "unsure", "yes"), {1, 2, 3}),
        (of_verdicts("unsure", "unsure", "unsure", "no"), {1, 2, 3}),
    ],
)
def test_one_is_kept_of_those_whose_order_is_known(forecasts: list[Forecast], expected: set[int]):
    assert left_out(forecasts) == expected


def test_what_is_recommended_is_kept_though_it_is_surely_slower():
    """Of those within report.speed_tolerance the smaller is recommended, because the fastest nearly fills its GPU."""
    forecasts, names = dict(enumerate(of_seconds(1.0, 1.02, 3.0, relative=0.01))), dict(enumerate("abc"))
    assert set(passed_over(forecasts, names, "1")[0]) == {1, 2}
    assert set(passed_over(forecasts, names, "1", recommended={"b"})[0]) == {2}


def test_keep_ranks_no_repeat_and_nothing_without_a_prediction():
    forecasts = of_seconds(1.0, 1.0, 5.0, 0.1, 9.0)
    forecasts[3] = replace(forecasts[3], capacity_bytes=50)
    forecasts[4] = replace(forecasts[4], speed=None)
    assert (left_out(forecasts, "1", "aabcd"), left_out(forecasts, "2", "aabcd")) == ({2, 3}, {3})
    why = passed_over({3: forecasts[3]}, {3: "c"}, "1")[0][3]
    assert (why.code, why.values["needed_bytes"], why.values["capacity_bytes"]) == (Code.does_not_fit, 100, 50)


def test_ratios_are_known_within_a_model_workers_and_a_device():
    gpu, settings = sheet("h100_sxm"), config("sharding=per_block", "precision=bf16_mixed")
    mine = ratio_group(settings, 8, gpu)
    other = config("sharding=per_block", "precision=bf16", "training.global_batch_size=32", "data.num_train=64")
    slow = on_network(gpu, 400)
    assert ratio_group(other, 8, gpu) == ratio_group(other, 8, slow) == mine
    others = (config("model.num_layers=24"), 8, gpu), (other, 16, gpu), (other, 8, replace(gpu, launch_s=1e-9))
    words = ("precision=float8",), ("precision=fp32",), ("sharding=root",), ("offload=cpu",)
    others += (other, 16, slow), *((config("sharding=per_block", *some), 8, gpu) for some in words)
    groups = [mine, *(ratio_group(*each) for each in others)]
    assert len({*groups}) == len(groups)
