"""Forecasts as a table for people and as CSV for everything else. Imports no torch."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fsdp_lab.files import whole
from fsdp_lab.forecast.capacity import Forecast
from fsdp_lab.profile import CATEGORIES
from fsdp_lab.speed.predict import BOUNDS, Speed
from fsdp_lab.terminal import Column, FittingTable
from fsdp_lab.wording import four_digits

# What a table has room for: the column's name -> the categories in it.
COLUMNS = {
    "params": ("param",),
    "optimizer": ("optimizer",),
    "grads": ("grad", "unsharded_grad"),
    "gathered": ("unsharded_param", "all_gather"),
    "activations": ("activation",),
    "rest": ("reduce_scatter", "temp", "buffer", "input", "other"),
}
# At any width stay the settings, `peak`, `needs`, `fits` and `largest microbatch`. Of the others the last leaves first.
_DROP_LAST = ("host", "activations", "params", "optimizer", "grads", "gathered", "rest")
# The columns of the CSV behind the swept keys.
_CSV = (
    "cluster.num_workers", "device", "data_sheet", "peak_bytes", *(f"{name}_bytes" for name in CATEGORIES),
    "active_bytes", "reserved_bytes", "needed_bytes", "host_bytes", *(f"host_{name}_bytes" for name in CATEGORIES),
    "capacity_bytes", "fits", "largest_microbatch", "timeline", "streams",
    "step_s", "step_low_s", "step_high_s", "samples_per_s_per_device", "tokens_per_s_per_device",
    "samples_per_s_of_all", "tokens_per_s_of_all", "mfu", "bound", *(f"{name}_share" for name in BOUNDS),
    "basis", "error_p90", "ratio_error_p90", "network_gbit", "network_assumed", "no_forecast", "no_speed",
)  # fmt: skip
_UNITS = (("GiB", 2**30, 10 * 2**30), ("MiB", 2**20, 0))


@dataclass(frozen=True)
class Row:
    """A configuration in the table.

    Attributes:
        settings: the values of the swept keys.
        forecast: of the configuration.
        page: its timeline; None: none was written.
        microbatch: samples that a worker takes at once.
        streams: the trace of its streams; None: none was written.
    """

    settings: list[str]
    forecast: Forecast
    page: Path | None = None
    microbatch: int = 0
    streams: Path | None = None


def in_order(rows: Sequence[Row]) -> list[Row]:
    """Return the rows in the order of the table; rows without a forecast come last.

    With speeds, each number of workers forms a group: what fits comes before what may fit, then what is tight, then
    what does not fit, the fastest first. Without speeds the smallest peak comes first.
    """

    def place(row: Row) -> tuple[float, ...]:
        forecast = row.forecast
        if forecast.error:
            return (1,)
        if forecast.speed is not None:
            room = forecast.may_fit + 2 * (forecast.fits is False) + (forecast.fits is False and not forecast.tight)
            return (0, forecast.num_workers, room, -forecast.speed.samples_per_s)
        return (0, 0, 0, forecast.peak_bytes)

    return sorted(rows, key=place)


def forecast_table(rows: Sequence[Row], swept: Sequence[str]) -> FittingTable:
    """Return a table with a line for each configuration: the peak of a worker, its parts, and whether it fits.

    Values that all rows share are in the title.
    """
    having = [row.forecast for row in rows if not row.forecast.error]
    unit, divisor = unit_of(having)
    workers, capacities = {row.forecast.num_workers for row in rows}, {one.capacity_bytes for one in having}
    columns = [
        Column(key, [row.settings[place] for row in rows], breaks=True, justify="left")
        for place, key in enumerate(swept)
    ]

    def add(name: str, text: Callable[[Forecast], str], none: str = "") -> None:
        cells = [none if row.forecast.error else text(row.forecast) for row in rows]
        columns.append(Column(name, cells, drop=1 + _DROP_LAST.index(name) if name in _DROP_LAST else 0))

    def size(num_bytes: int | None) -> str:
        return f"{(num_bytes or 0) / divisor:,.2f}"

    def add_bytes(name: str, num_bytes: Callable[[Forecast], int | None], none: str = "") -> None:
        if any(size(num_bytes(forecast)) != size(0) for forecast in having):  # a column of zeros says nothing
            add(name, lambda forecast: size(num_bytes(forecast)), none)

    def needs(forecast: Forecast) -> str:
        return (
            f"{size(forecast.least_bytes)} to {size(forecast.needed_bytes)}"
            if forecast.tight
            else size(forecast.needed_bytes)
        )

    if len(workers) > 1 and "cluster.num_workers" not in swept:
        columns.append(Column("workers", [str(row.forecast.num_workers) for row in rows]))
    add_bytes("peak", lambda one: one.peak_bytes, none="none")
    for name, parts in COLUMNS.items():
        add_bytes(name, partial(Forecast.of, categories=parts))
    if any(one.allowances for one in having):
        add("needs", needs)
    add_bytes("host", lambda one: one.host_bytes)
    if len(capacities) > 1:
        add_bytes("capacity", lambda one: one.capacity_bytes)
    if capacities - {None}:
        add("fits", lambda one: _whether(one, "yes", "tight", "no"))
    if any(one.speed for one in having):
        _add_speed(add, [one.speed for one in having if one.speed])
    if any(one.largest_microbatch is not None for one in having):
        add("largest microbatch", lambda one: f"{one.largest_microbatch:,}" if one.largest_microbatch else "0")
    of = f"one of {max(workers):,} workers" if len(workers) == 1 and max(workers) > 1 else "one worker"
    return FittingTable(columns, f"forecast peak of {of}, {unit}", "forecast.csv")


def _whether(forecast: Forecast, yes: str, tight: str, no: str) -> str:
    """Return the word for whether it fits, or `upper bound` if only that exceeds the capacity; "" without one."""
    if forecast.may_fit:
        return "upper bound"
    if forecast.fits is None:
        return ""
    return yes if forecast.fits else tight if forecast.tight else no


def _add_speed(add: Callable[[str, Callable[[Forecast], str]], None], speeds: Sequence[Speed]) -> None:
    """Add the columns of predicted speeds."""

    def cell(text: Callable[[Speed, int], str]) -> Callable[[Forecast], str]:
        return lambda forecast: text(forecast.speed, forecast.num_workers) if forecast.speed else ""

    add("step ms", cell(lambda speed, workers: four_digits(speed.step_s * 1e3)))
    if any(speed.tokens is not None for speed in speeds):
        add("tokens/s per device", cell(lambda speed, workers: f"{(speed.tokens_per_s or 0) / workers:,.0f}"))
    else:
        add("samples/s per device", cell(lambda speed, workers: four_digits(speed.samples_per_s / workers)))
    if any(speed.mfu is not None for speed in speeds):
        add("MFU", cell(lambda speed, workers: "" if speed.mfu is None else f"{speed.mfu * 100:.0f} %"))
    add("bound", cell(lambda speed, workers: speed.bound))


def unit_of(having: Sequence[Forecast]) -> tuple[str, int]:
    """Return the unit of a table of these forecasts, by its largest value, and the unit's bytes."""
    highest = max(
        (max(forecast.needed_bytes, forecast.host_bytes) for forecast in having if not forecast.error), default=0
    )
    return next((name, size) for name, size, at_least in _UNITS if highest >= at_least)


def write_csv(path: Path, rows: Sequence[Row], swept: Sequence[str]) -> None:
    """Write every figure in bytes as CSV, a row for each configuration."""
    cells = [dict(zip(swept, row.settings, strict=True)) | _cells(row) for row in rows]
    with whole(path) as making, making.open("w", newline="") as out:
        lines = csv.DictWriter(out, dict.fromkeys([*swept, *_CSV]))
        lines.writeheader()
        lines.writerows(cells)


def _cells(row: Row) -> dict[str, object]:
    forecast = row.forecast
    cells: dict[str, object] = {
        "cluster.num_workers": forecast.num_workers,
        "device": "cuda" if forecast.cuda else "cpu",
        "data_sheet": forecast.data_sheet,
        "timeline": row.page,
        "streams": row.streams,
        "no_forecast": forecast.error,
        "no_speed": forecast.no_speed,
    }
    if forecast.error:
        return cells
    host = forecast.peaks.get("host", {})
    cells |= {f"{name}_bytes": forecast.of((name,)) for name in CATEGORIES}
    cells |= {f"host_{name}_bytes": host.get(name, 0) for name in CATEGORIES}
    cells |= {
        "peak_bytes": forecast.peak_bytes,
        "active_bytes": forecast.active_bytes,
        "reserved_bytes": forecast.reserved_bytes,
        "needed_bytes": forecast.needed_bytes,
        "host_bytes": forecast.host_bytes,
        "capacity_bytes": forecast.capacity_bytes,
        "fits": _whether(forecast, "true", "tight", "false"),
        "largest_microbatch": forecast.largest_microbatch,
    }
    return cells | (_speed_cells(forecast.speed, forecast.num_workers) if forecast.speed else {})


def _speed_cells(speed: Speed, workers: int) -> dict[str, object]:
    rates = {"samples": speed.samples_per_s, "tokens": speed.tokens_per_s}
    network = speed.network
    return {
        "step_s": speed.step_s,
        "step_low_s": speed.low_s,
        "step_high_s": speed.high_s,
        **{f"{name}_per_s_per_device": rate and rate / workers for name, rate in rates.items()},
        **{f"{name}_per_s_of_all": rate for name, rate in rates.items()},
        "mfu": speed.mfu,
        "bound": speed.bound,
        **{f"{name}_share": f"{speed.shares[name]:.4f}" for name in BOUNDS},
        "basis": speed.basis,
        "error_p90": speed.error,
        "ratio_error_p90": speed.relative,
        "network_gbit": network and network.gbit,
        "network_assumed": network and str(bool(network.steps)).lower(),
    }
