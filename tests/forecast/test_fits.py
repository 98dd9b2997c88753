"""The three answers to whether a setting fits, made by hand, and what each reader of them does."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from rich.console import Console

from fsdp_lab.forecast.fits import Forecast
from fsdp_lab.forecast.keep import passed_over
from fsdp_lab.forecast.recommend import recommend, speed_verdict
from fsdp_lab.forecast.table import Row, forecast_table, in_order, write_csv
from fsdp_lab.forecast.verdict import verdict
from fsdp_lab.speed.device import Basis
from fsdp_lab.speed.predict import BOUNDS, Speed

PEAK, CONTEXT = 700, 100  # bytes
NEEDS = {"yes": 900, "tight": 1001, "no": 1001}
ACTIVE = {"yes": 750, "tight": 900, "no": 901}


def found(verdict: str, step_s: float = 1.0, capacity: int | None = 1000) -> Forecast:
    reserved = NEEDS[verdict] - CONTEXT
    allowances = {"CUDA context": CONTEXT, "fragmentation": reserved - PEAK}
    speed = Speed(step_s, dict.fromkeys(BOUNDS, 0.2), step_s / 1.1, step_s / 0.9, 0.1, Basis.fitted, "X", samples=10)
    peaks = {"device": {"total": PEAK}}
    return Forecast(
        True, 8, peaks, allowances, {}, capacity, None, ACTIVE[verdict], reserved_bytes=reserved, speed=speed
    )


def row(name: str, verdict: str, step_s: float) -> Row:
    return Row([name], found(verdict, step_s), None, 64)


ROWS = [row("ddp", "no", 0.5), row("root", "tight", 1.0), row("per_layer", "tight", 2.5), row("per_block", "yes", 2.0)]


@pytest.mark.parametrize(
    ("forecast", "fits", "tight"),
    [
        (found("yes"), True, False),
        (found("tight"), False, True),  # 900 active and 100 beside the allocator: what it caches is too much
        (found("no"), False, False),
        (found("tight", capacity=None), None, False),
        (Forecast(False, 8, {"device": {"total": 1001}}, capacity_bytes=1000), False, False),  # a CPU caches nothing
        (Forecast(True, 8, capacity_bytes=1000, error="why"), None, False),
    ],
)
def test_what_is_tight_fits_without_what_the_allocator_caches(forecast: Forecast, fits: bool | None, tight: bool):
    assert (forecast.fits, forecast.tight) == (fits, tight)


def test_the_table_and_the_csv_name_it_and_it_stands_between_the_others(tmp_path: Path):
    rows = in_order(ROWS)
    assert [r.settings[0] for r in rows] == ["per_block", "root", "per_layer", "ddp"]
    shown = io.StringIO()
    Console(file=shown, width=200).print(forecast_table(rows, ["sharding"]))
    lines = shown.getvalue().splitlines()[-4:]
    assert [[word for word in line.split() if word in NEEDS] for line in lines] == [
        ["yes"],
        ["tight"],
        ["tight"],
        ["no"],
    ]
    write_csv(tmp_path / "f.csv", rows, ["sharding"])
    cells = [(line["fits"], line["active_bytes"]) for line in csv.DictReader((tmp_path / "f.csv").open())]
    assert cells == [("true", "750"), ("tight", "900"), ("tight", "900"), ("false", "901")]


def test_a_sentence_says_what_may_run():
    assert "only per_block fits; root and per_layer may run, slower: tight" in verdict(ROWS, ["sharding"])
    alone = verdict([Row([], found("tight"), None, 64)], [])
    assert "it does not fit" in alone and "it may run, slower: tight" in alone
    assert "tight" not in verdict([ROWS[0], ROWS[3]], ["sharding"])


def test_only_what_fits_is_recommended_and_what_is_tight_and_faster_is_named():
    assert [r.settings[0] for r in recommend(ROWS, ["sharding"], 0.0)] == ["per_block"]
    told = speed_verdict(ROWS, ["sharding"], 0.0)
    assert told[0].startswith("Should be fastest of what fits: per_block:")
    assert told[-1].startswith("Faster as predicted, but tight: root. Where memory is short")


@pytest.mark.parametrize(
    ("verdicts", "keep", "expected"),
    [
        (("tight", "yes", "yes", "yes"), "1", {2, 3}),  # tight is measured beside the fastest of what fits
        (("yes", "yes", "tight", "yes"), "1", {1, 2, 3}),  # nor is it where it cannot be as fast
        (("tight", "tight", "tight", "no"), "1", {1, 2, 3}),  # where nothing fits it is ranked alone
        (("no", "yes", "yes", "yes"), "1", {0, 2, 3}),
    ],
)
def test_what_is_tight_takes_no_place_of_what_fits(verdicts: tuple[str, ...], keep: str, expected: set[int]):
    forecasts = {n: found(verdict, 2.0**n) for n, verdict in enumerate(verdicts)}
    left_out = passed_over(forecasts, {n: str(n) for n in forecasts}, keep)
    assert set(left_out) == expected
