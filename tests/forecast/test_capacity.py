"""The three answers to whether a setting fits, made by hand, and what each reader of them does."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from fsdp_lab.forecast.answer import answers, recommended, sentences
from fsdp_lab.forecast.capacity import NEARLY_FULL, NEARLY_FULL_ERROR, Forecast, NoForecast, on_capacity
from fsdp_lab.forecast.keep import passed_over
from fsdp_lab.forecast.notes import allowances_note
from fsdp_lab.forecast.table import Row, forecast_table, in_order, write_csv
from fsdp_lab.speed.device import Basis
from fsdp_lab.speed.predict import BOUNDS, Speed

PEAK, CONTEXT = 700, 100  # bytes
NEEDS = {"yes": 900, "tight": 1001, "no": 1001}
ACTIVE = {"yes": 750, "tight": 900, "no": 901}


def forecast_of(verdict: str, step_s: float = 1.0, capacity: int | None = 1000) -> Forecast:
    reserved = NEEDS[verdict] - CONTEXT
    allowances = {"CUDA context": CONTEXT, "fragmentation": reserved - PEAK}
    speed = Speed(step_s, dict.fromkeys(BOUNDS, 0.2), step_s / 1.1, step_s / 0.9, 0.1, Basis.fitted, "X", samples=10)
    peaks = {"device": {"total": PEAK}}
    return Forecast(
        True, 8, peaks, allowances, {}, capacity, None, ACTIVE[verdict], reserved_bytes=reserved, speed=speed
    )


def row(name: str, verdict: str, step_s: float) -> Row:
    return Row([name], forecast_of(verdict, step_s), None, 64)


def said(rows: list[Row]) -> str:
    return sentences(rows, ["sharding"], "items", answers(rows, ["sharding"], 0.0), 0.0)


def at_most(verdict: str, step_s: float = 1.0) -> Forecast:
    """One whose memory is an upper bound."""
    return replace(forecast_of(verdict, step_s), upper_bound="compile=true")


ROWS = [row("ddp", "no", 0.5), row("root", "tight", 1.0), row("per_layer", "tight", 2.5), row("per_block", "yes", 2.0)]


@pytest.mark.parametrize(
    ("forecast", "fits", "tight"),
    [
        (forecast_of("yes"), True, False),
        (forecast_of("tight"), False, True),  # 900 active and 100 beside the allocator: what it caches is too much
        (forecast_of("no"), False, False),
        (forecast_of("tight", capacity=None), None, False),
        (Forecast(False, 8, {"device": {"total": 1001}}, capacity_bytes=1000), False, False),  # a CPU caches nothing
        (Forecast(True, 8, capacity_bytes=1000, error=NoForecast("cancelled")), None, False),
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


def test_only_what_fits_is_recommended_and_what_is_tight_is_said_to_be_slower():
    assert [r.settings for r in recommended(ROWS, ["sharding"], 0.0)] == [["per_block"]]
    text = said(ROWS)
    assert "1 of 4 settings fits; 2 tight: may run, but slower." in text
    assert "Recommended: sharding=per_block:" in text
    assert re.search(r"  sharding=root: 2.00× \(.*\) the speed,\n    .* more, tight: it may run, but slower\n", text)
    assert re.search(r"  sharding=ddp: 4.00× \(.*\) the speed,\n    .* more, does not fit\n", text)
    assert "tight" not in said([ROWS[0], ROWS[3]])


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
    forecasts = {n: forecast_of(verdict, 2.0**n) for n, verdict in enumerate(verdicts)}
    left_out = passed_over(forecasts, {n: str(n) for n in forecasts}, keep)
    assert set(left_out) == expected


@pytest.mark.parametrize(("verdict", "may_fit"), [("yes", False), ("tight", True), ("no", True)])
def test_an_upper_bound_says_that_a_setting_fits_and_never_that_it_does_not(verdict: str, may_fit: bool):
    forecast = at_most(verdict)
    assert (forecast.fits, forecast.tight, forecast.may_fit) == (None if may_fit else True, False, may_fit)
    assert not replace(forecast, capacity_bytes=None).may_fit


def test_an_upper_bound_is_named_in_the_table_and_in_the_sentence(tmp_path: Path):
    rows = in_order([*ROWS, Row(["fused"], at_most("no", 0.1), None, 64)])
    assert [r.settings[0] for r in rows] == ["per_block", "fused", "root", "per_layer", "ddp"]
    write_csv(tmp_path / "f.csv", rows, ["sharding"])
    cells = [line["fits"] for line in csv.DictReader((tmp_path / "f.csv").open())]
    assert cells == ["true", "upper bound", "tight", "tight", "false"]
    assert "1 of 5 settings fits; 2 tight: may run, but slower; 1 may fit: only an upper bound" in said(rows)


def test_no_setting_is_dropped_by_an_upper_bound():
    """It is recommended where it is the fastest, beside the fastest that surely fits, and takes no place of that."""
    rows = [Row(["fused"], at_most("no", 1.0), None, 64), row("plain", "yes", 2.0), row("ddp", "no", 0.5)]
    text = said(rows)
    assert "Recommended: sharding=fused: " in text and "Whether it fits is not known: " in text
    assert "is an upper bound (compile=true). The fastest that fits: sharding=plain." in text
    forecasts = {number: row.forecast for number, row in enumerate(rows)}
    assert set(passed_over(forecasts, {0: "a", 1: "b", 2: "c"}, "1")) == {2}
    slower = {0: at_most("no", 4.0), 1: forecast_of("yes", 1.0)}
    assert set(passed_over(slower, {0: "a", 1: "b"}, "1")) == {0}, "which is too slow"


ROOT = Path(__file__).parents[2]


def test_the_share_of_memory_from_which_steps_are_slower_is_that_of_the_published_rows():
    """The rows of MPT: what each needs by its forecast, where it needs much, and how far off its predicted time was."""
    with (ROOT / "experiments" / "published" / "results" / "rows.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["row"].startswith("m")]
    errors = [(float(row["share"] or 0), float(row["error"].rstrip("%")) / 100) for row in rows]
    full = [error for share, error in errors if share > NEARLY_FULL]
    others = [error for share, error in errors if share <= NEARLY_FULL]
    assert (len(full), len(others)) == (39, 71)
    assert sum(error < -0.08 for error in full) == 4 and sum(abs(error) > 0.08 for error in others) == 2
    too_fast = sorted(-error for error in full)
    assert too_fast[-1] == pytest.approx(1 - 1 / 1.36, abs=5e-3), "36% longer"
    place = 0.9 * (len(full) - 1)
    low, high = too_fast[int(place)], too_fast[int(place) + 1]
    assert low + (place - int(place)) * (high - low) == pytest.approx(NEARLY_FULL_ERROR, abs=2e-3), "nine of ten"


def test_a_step_on_a_nearly_full_gpu_may_be_slower_and_the_fastest_with_room_is_named():
    full = replace(forecast_of("yes", 1.0), capacity_bytes=950)  # of which it needs 900
    assert full.speed is not None and full.fits and full.nearly_full
    full = replace(full, speed=replace(full.speed, relative=0.1, group="one"))
    slower, same = on_capacity(full, 950).speed, on_capacity(full, 1000).speed
    assert same == full.speed
    assert slower is not None and full.speed is not None
    assert (
        slower.high_s == pytest.approx(max(1 / 0.9, 1.0 / (1 - NEARLY_FULL_ERROR))) and slower.low_s == full.speed.low_s
    )
    assert slower.relative is None and slower.error == full.speed.error
    on_cpu = replace(full, cuda=False)
    assert on_capacity(on_cpu, 950).speed == full.speed, "which has no allocator that retries"
    rows = [Row(["root"], on_capacity(full, 950), None, 64), Row(["ddp"], forecast_of("yes", 1.2, 2000), None, 64)]
    text = said(rows)
    assert "Recommended: sharding=root: " in text and "Step 1.00 s (0.909 to 1.11)." in text
    assert "It needs 95 % of its GPU, " in text and "took 11 to 36 % longer than predicted" in text
    assert "The fastest setting that leaves room: sharding=ddp." in text
    assert "No other setting leaves more room." in said([rows[0], replace(rows[0], settings=["ddp"])])


def test_the_table_has_for_what_is_tight_the_least_that_may_do_and_no_column_of_zeros():
    def shown(*forecasts: Forecast) -> list[str]:
        out = io.StringIO()
        rows = [Row([str(n)], each, None, 64) for n, each in enumerate(forecasts)]
        Console(file=out, width=200).print(forecast_table(rows, ["sharding"]))
        return out.getvalue().splitlines()

    def larger(forecast: Forecast) -> Forecast:
        sizes = {name: size * 2**20 for name, size in forecast.allowances.items()}
        assert forecast.active_bytes and forecast.reserved_bytes and forecast.capacity_bytes
        return replace(
            forecast, peaks={"device": {"total": PEAK * 2**20}}, allowances=sizes,
            active_bytes=forecast.active_bytes * 2**20, reserved_bytes=forecast.reserved_bytes * 2**20,
            capacity_bytes=forecast.capacity_bytes * 2**20,
        )  # fmt: skip

    lines = shown(larger(forecast_of("yes")), larger(forecast_of("tight")))
    assert " 900.00 " in lines[-2] and " 1,000.00 to 1,001.00 " in lines[-1]
    head = " ".join(lines[:4])
    assert "peak" in head and "host" not in head and "params" not in head


def test_what_is_assumed_is_a_range_where_settings_differ():
    """As hybrid sharding, with communicators for its replicas, beside another one."""
    one = forecast_of("yes")
    plain, hybrid = (
        replace(one, allowances={"NCCL buffers": size * 2**20, "fragmentation": part * 2**20})
        for size, part in ((512, 30), (1536, 10))
    )
    both = allowances_note([plain, hybrid])
    assert "peak + 512 to 1,536 NCCL buffers (assumed) + up to 30 cached" in both
    assert "peak + 512 NCCL buffers (assumed)" in allowances_note([plain, plain])
    assert allowances_note([replace(one, allowances={})]) == ""
