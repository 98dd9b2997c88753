"""Forecasts as a table for people and as CSV for everything else. Imports no torch."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fsdp_lab.files import whole
from fsdp_lab.forecast.fits import Forecast
from fsdp_lab.profile import CATEGORIES
from fsdp_lab.speed.predict import BOUNDS, Speed
from fsdp_lab.terminal import Column, FittingTable

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
# Of the CSV.
SPEEDS = (
    "step_s", "step_low_s", "step_high_s", "samples_per_s_per_device", "tokens_per_s_per_device",
    "samples_per_s_of_all", "tokens_per_s_of_all", "mfu", "bound", *(f"{name}_share" for name in BOUNDS),
    "basis", "error_p90", "ratio_error_p90",
)  # fmt: skip
_UNITS = (("GiB", 2**30, 10 * 2**30), ("MiB", 2**20, 0))


@dataclass(frozen=True)
class Row:
    """A configuration: `settings` are the values of the swept keys; `page` its timeline and `streams` the page of its
    streams, where there is one; `microbatch` how many samples a worker takes at once."""

    settings: list[str]
    forecast: Forecast
    page: Path | None = None
    microbatch: int = 0
    streams: Path | None = None


def in_order(rows: Sequence[Row]) -> list[Row]:
    """Where speeds were predicted, each number of workers for itself: what fits before what is tight, and that before
    what does not fit, the fastest first. Else the smallest peak first. What has no forecast comes last."""

    def place(row: Row) -> tuple[float, ...]:
        found = row.forecast
        if found.error:
            return (1,)
        if found.speed is not None:
            room = (found.fits is False) + (found.fits is False and not found.tight)
            return (0, found.num_workers, room, -_each(found, found.speed.samples_per_s))
        return (0, 0, 0, found.peak_bytes)

    return sorted(rows, key=place)


def forecast_table(rows: Sequence[Row], swept: Sequence[str]) -> FittingTable:
    """Returns a table with a line for each configuration: the peak of a worker, what it is made of, whether it fits.

    What all rows share is in the title.
    """
    having = [row.forecast for row in rows if not row.forecast.error]
    unit, divisor = _unit(having)
    workers, capacities = {row.forecast.num_workers for row in rows}, {found.capacity_bytes for found in having}
    columns = [
        Column(key, [row.settings[place] for row in rows], breaks=True, justify="left")
        for place, key in enumerate(swept)
    ]

    def add(name: str, text: Callable[[Forecast], str], none: str = "") -> None:
        cells = [none if row.forecast.error else text(row.forecast) for row in rows]
        columns.append(Column(name, cells, drop=1 + _DROP_LAST.index(name) if name in _DROP_LAST else 0))

    def add_bytes(name: str, num_bytes: Callable[[Forecast], int | None], none: str = "") -> None:
        add(name, lambda found: f"{(num_bytes(found) or 0) / divisor:,.2f}", none)

    if len(workers) > 1 and "cluster.num_workers" not in swept:
        columns.append(Column("workers", [str(row.forecast.num_workers) for row in rows]))
    add_bytes("peak", lambda found: found.peak_bytes, none="none")
    for name, parts in COLUMNS.items():
        add_bytes(name, partial(Forecast.of, categories=parts))
    if any(found.allowances for found in having):
        add_bytes("needs", lambda found: found.needed_bytes)
    if any(found.host_bytes for found in having):
        add_bytes("host", lambda found: found.host_bytes)
    if len(capacities) > 1:
        add_bytes("capacity", lambda found: found.capacity_bytes)
    if capacities - {None}:
        add("fits", lambda found: _whether(found, "yes", "tight", "no"))
    if any(found.speed for found in having):
        _add_speed(add, [found.speed for found in having if found.speed])
    if any(found.largest_microbatch is not None for found in having):
        add("largest microbatch", lambda found: f"{found.largest_microbatch:,}" if found.largest_microbatch else "0")
    of = f"one of {max(workers):,} workers" if len(workers) == 1 and max(workers) > 1 else "one worker"
    return FittingTable(columns, f"forecast peak of {of}, {unit}", "forecast.csv")


def _whether(found: Forecast, yes: str, tight: str, no: str) -> str:
    """Return the word for whether it fits; "" where that is not known."""
    if found.fits is None:
        return ""
    return yes if found.fits else tight if found.tight else no


def _add_speed(add: Callable[[str, Callable[[Forecast], str]], None], speeds: Sequence[Speed]) -> None:
    """Add the columns of predicted speeds."""

    def cell(text: Callable[[Speed, int], str]) -> Callable[[Forecast], str]:
        return lambda found: text(found.speed, found.num_workers) if found.speed else ""

    add("step ms", cell(lambda speed, workers: f"{speed.step_s * 1e3:,.4g}"))
    if any(speed.tokens is not None for speed in speeds):
        add("tokens/s per device", cell(lambda speed, workers: f"{(speed.tokens_per_s or 0) / workers:,.0f}"))
    else:
        add("samples/s per device", cell(lambda speed, workers: f"{speed.samples_per_s / workers:,.4g}"))
    if any(speed.mfu is not None for speed in speeds):
        add("MFU", cell(lambda speed, workers: "" if speed.mfu is None else f"{speed.mfu * 100:.0f} %"))
    add("bound", cell(lambda speed, workers: speed.bound))


def _unit(having: Sequence[Forecast]) -> tuple[str, int]:
    """What the table is in, by its largest value, and how many bytes that is."""
    highest = max((max(found.needed_bytes, found.host_bytes) for found in having), default=0)
    return next((name, size) for name, size, at_least in _UNITS if highest >= at_least)


def write_csv(path: Path, rows: Sequence[Row], swept: Sequence[str]) -> None:
    """Every figure in bytes, a row a configuration."""
    with whole(path) as making, making.open("w", newline="") as out:
        lines = csv.writer(out)
        lines.writerow(
            [
                *swept,
                *([] if "cluster.num_workers" in swept else ["cluster.num_workers"]),
                "device",
                "data_sheet",
                "peak_bytes",
                *(f"{name}_bytes" for name in CATEGORIES),
                "active_bytes",
                "reserved_bytes",
                "needed_bytes",
                "host_bytes",
                *(f"host_{name}_bytes" for name in CATEGORIES),
                "capacity_bytes",
                "fits",
                "largest_microbatch",
                "timeline",
                "streams",
                *SPEEDS,
                "no_forecast",
                "no_speed",
            ]
        )
        for row in rows:
            lines.writerow([*row.settings, *_cells(row, "cluster.num_workers" not in swept)])


def _cells(row: Row, with_workers: bool) -> list[object]:
    found = row.forecast
    kind = "cuda" if found.cuda else "cpu"
    start: list[object] = [*([found.num_workers] if with_workers else []), kind, found.data_sheet or ""]
    if found.error:
        pages = [row.page or "", row.streams or ""]
        return [*start, *[""] * (2 * len(CATEGORIES) + 8), *pages, *[""] * len(SPEEDS), found.error, ""]
    device, host = found.peaks["device"], found.peaks.get("host", {})
    return [
        *start,
        found.peak_bytes,
        *(device.get(name, 0) for name in CATEGORIES),
        "" if found.active_bytes is None else found.active_bytes,
        "" if found.reserved_bytes is None else found.reserved_bytes,
        found.needed_bytes,
        found.host_bytes,
        *(host.get(name, 0) for name in CATEGORIES),
        "" if found.capacity_bytes is None else found.capacity_bytes,
        _whether(found, "true", "tight", "false"),
        "" if found.largest_microbatch is None else found.largest_microbatch,
        row.page or "",
        row.streams or "",
        *_speed_cells(found),
        "",
        found.no_speed or "",
    ]


def _each(found: Forecast, of_all: float) -> float:
    """A device's part of what all workers do together."""
    return of_all / found.num_workers


def _speed_cells(found: Forecast) -> list[object]:
    speed = found.speed
    if speed is None:
        return [""] * len(SPEEDS)
    rates = [speed.samples_per_s, speed.tokens_per_s]
    each = [None if rate is None else _each(found, rate) for rate in rates]
    cells = [speed.step_s, speed.low_s, speed.high_s, *each, *rates, speed.mfu, speed.bound]
    shares = [f"{speed.shares[name]:.4f}" for name in BOUNDS]
    return ["" if cell is None else cell for cell in [*cells, *shares, speed.basis, speed.error, speed.relative]]
