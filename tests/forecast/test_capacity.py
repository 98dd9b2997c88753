"""The three answers to whether a setting fits, made by hand, and what each reader of them does."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_lab.forecast.answer import answers
from fsdp_lab.forecast.capacity import GIB, NEARLY_FULL, NEARLY_FULL_ERROR, Forecast, Host, NoForecast, on_capacity
from fsdp_lab.forecast.sentences import allowances_note
from fsdp_lab.forecast.table import Row, forecast_table, in_order, write_csv
from fsdp_lab.forecast.words import say
from fsdp_lab.report.render import needs_text
from tests.forecast.planted import forecast_of

ROWS = [
    Row([name], forecast_of(verdict, step_s), None, 64)
    for name, verdict, step_s in (
        ("ddp", "no", 0.5), ("root", "tight", 1.0), ("per_layer", "tight", 2.5), ("per_block", "yes", 2.0)
    )
]  # fmt: skip


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


def offloaded(gib: int | None, workers: int = 8, **changes: object) -> Forecast:
    """One that fits its GPU, and whose workers need 100 GiB each on a host of so many GiB."""
    forecast = forecast_of("yes", 2.0, **changes)
    host = {"host": {"total": 100 * GIB, "param": 60 * GIB}}
    return on_capacity(
        replace(forecast, peaks=forecast.peaks | host), 1000, Host(None if gib is None else gib * GIB, workers)
    )


@pytest.mark.parametrize(
    ("forecast", "fits"),
    [
        (offloaded(800), True),
        (offloaded(799), False),
        (offloaded(799, workers=4), True),  # the others are on another host
        (offloaded(None), True),
    ],
)
def test_all_workers_of_a_host_have_to_fit_it(forecast: Forecast, fits: bool):
    assert (forecast.fits, forecast.tight) == (fits, False)
    other = Row(["none"], forecast_of("yes", 3.0), None, 64)
    (answer,) = answers([Row(["cpu"], forecast, None, 64), other], ["offload"], 0.0)
    assert answer.best and answer.best.settings == (["cpu"] if fits else ["none"])
    if not fits:
        assert set(answer.recommendation.why_not) == {"offload=cpu"}
        text = "needs 819200.00 MiB of the 818176.00 MiB of its host, by its forecast (102400.00 for each of 8)"
        assert needs_text(**forecast.shortage) == text


def test_the_hosts_memory_is_named_where_it_was_not_checked_or_is_short():
    assert say("host", [forecast_of("yes"), offloaded(800)]) == []
    short, unknown = say("host", [offloaded(799), offloaded(None), offloaded(None, workers=4)])
    assert short == (
        "host memory: 1 offloaded setting that fit no host: 8 workers of a host need up to 800 GiB, and it has 799 GiB."
    )
    assert unknown.startswith("host memory: 2 offloaded settings not checked: 8 workers of a host need up to 800 GiB")


def test_the_table_and_the_csv_name_it_and_it_stands_between_the_others(tmp_path: Path):
    rows = in_order(ROWS)
    assert [r.settings[0] for r in rows] == ["per_block", "root", "per_layer", "ddp"]
    (fits,) = [column.cells for column in forecast_table(rows, ["sharding"]).columns if column.name == "fits"]
    assert fits == ["yes", "tight", "tight", "no"]
    write_csv(tmp_path / "f.csv", rows, ["sharding"])
    cells = [(line["fits"], line["active_bytes"]) for line in csv.DictReader((tmp_path / "f.csv").open())]
    assert cells == [("true", "750"), ("tight", "900"), ("tight", "900"), ("false", "901")]


def test_only_what_fits_is_recommended():
    (answer,) = answers(ROWS, ["sharding"], 0.0)
    assert answer.best and answer.best.settings == ["per_block"]
    assert set(answer.recommendation.why_not) == {"sharding=ddp", "sharding=root", "sharding=per_layer"}


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
    rows = [Row([name], forecast_of("yes", step_s, size), None, 64) for name, step_s, size in
            (("root", 1.0, 950), ("ddp", 1.2, 2000))]  # fmt: skip
    (answer,) = answers(rows, ["sharding"], 0.0)
    assert answer.best is rows[0] and answer.roomy and answer.row(answer.roomy) is rows[1]
    (alone,) = answers(rows[:1] * 2, ["sharding"], 0.0)
    assert alone.roomy is None


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
