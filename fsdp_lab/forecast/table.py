"""Forecasts as a table for people and as CSV for everything else. Imports no torch."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from fsdp_lab.files import whole
from fsdp_lab.forecast.fits import Forecast
from fsdp_lab.profile import CATEGORIES

# What a table has room for: the column's name -> the categories in it.
COLUMNS = {
    "params": ("param",),
    "optimizer": ("optimizer",),
    "grads": ("grad", "unsharded_grad"),
    "gathered": ("unsharded_param", "all_gather"),
    "activations": ("activation",),
    "rest": ("reduce_scatter", "temp", "buffer", "input", "other"),
}
_UNITS = (("GiB", 2**30, 10 * 2**30), ("MiB", 2**20, 0))


@dataclass(frozen=True)
class Row:
    """A configuration: `settings` are the values of the swept keys; `page` its timeline, where there is one."""

    settings: list[str]
    forecast: Forecast
    page: Path | None = None


def by_peak(rows: Sequence[Row]) -> list[Row]:
    """The smallest first; what has no forecast last."""
    return sorted(rows, key=lambda row: row.forecast.peak_bytes if not row.forecast.error else float("inf"))


def forecast_table(rows: Sequence[Row], swept: Sequence[str]) -> Table:
    """One line a configuration: the peak of a device, what it is made of, and whether it fits."""
    having = [row.forecast for row in rows if not row.forecast.error]
    highest = max((f.peak_bytes for f in having), default=0)
    asked_in_gib = any((f.capacity_bytes or 0) >= 2**30 for f in having)
    unit, divisor = next((name, size) for name, size, at_least in _UNITS if highest >= at_least or asked_in_gib)
    host = any(f.host_bytes for f in having)
    capacity = any(f.capacity_bytes is not None for f in having)
    asked = any(f.largest_microbatch is not None for f in having)
    needs = any(f.allowances for f in having)

    table = Table(title=f"forecast peak of one worker, {unit}")
    for name in [*swept, *([] if "cluster.num_workers" in swept else ["workers"])]:
        table.add_column(name, overflow="fold")
    optional = [
        (needs, "needs"), (host, "host"), (capacity, "capacity"), (capacity, "fits"), (asked, "largest microbatch"),
    ]  # fmt: skip
    for name in ["peak", *COLUMNS, *(name for shown, name in optional if shown)]:
        table.add_column(name, justify="right")
    for row in rows:
        found = row.forecast
        settings = [*row.settings, *([] if "cluster.num_workers" in swept else [str(found.num_workers)])]
        if found.error:
            table.add_row(*settings, f"[red]{escape(found.error.split(';')[0])}[/]")
            continue
        device = found.peaks["device"]
        cells = [found.peak_bytes, *(sum(device.get(c, 0) for c in names) for names in COLUMNS.values())]
        fits = {None: "", True: "[green]yes[/]", False: "[bold red]no[/]"}[found.fits]
        extra = [
            f"{found.needed_bytes / divisor:,.2f}",
            f"{found.host_bytes / divisor:,.2f}",
            f"{(found.capacity_bytes or 0) / divisor:,.2f}",
            fits,
            "" if found.largest_microbatch is None else str(found.largest_microbatch),
        ]
        shown = [text for text, (wanted, _) in zip(extra, optional, strict=True) if wanted]
        table.add_row(*settings, *(f"{value / divisor:,.2f}" for value in cells), *shown)
    return table


def write_csv(path: Path, rows: Sequence[Row], swept: Sequence[str]) -> None:
    """Every figure in bytes, a row a configuration."""
    with whole(path) as making, making.open("w", newline="") as out:
        lines = csv.writer(out)
        lines.writerow(
            [
                *swept,
                *([] if "cluster.num_workers" in swept else ["cluster.num_workers"]),
                "device",
                "peak_bytes",
                *(f"{name}_bytes" for name in CATEGORIES),
                "reserved_bytes",
                "needed_bytes",
                "host_bytes",
                *(f"host_{name}_bytes" for name in CATEGORIES),
                "capacity_bytes",
                "fits",
                "largest_microbatch",
                "timeline",
                "error",
            ]
        )
        for row in rows:
            lines.writerow([*row.settings, *_cells(row, "cluster.num_workers" not in swept)])


def _cells(row: Row, with_workers: bool) -> list[object]:
    found = row.forecast
    start: list[object] = [*([found.num_workers] if with_workers else []), "cuda" if found.cuda else "cpu"]
    if found.error:
        return [*start, *[""] * (2 * len(CATEGORIES) + 7), row.page or "", found.error]
    device, host = found.peaks["device"], found.peaks.get("host", {})
    return [
        *start,
        found.peak_bytes,
        *(device.get(name, 0) for name in CATEGORIES),
        "" if found.reserved_bytes is None else found.reserved_bytes,
        found.needed_bytes,
        found.host_bytes,
        *(host.get(name, 0) for name in CATEGORIES),
        "" if found.capacity_bytes is None else found.capacity_bytes,
        "" if found.fits is None else str(found.fits).lower(),
        "" if found.largest_microbatch is None else found.largest_microbatch,
        row.page or "",
        "",
    ]
