"""A picture of many forecasts: the needs and speeds of each over the number of workers, or the parts of each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_lab.forecast.table import COLUMNS, Row, unit_of
from fsdp_lab.record.trial import words

if TYPE_CHECKING:
    import pandas as pd

WORKERS = "cluster.num_workers"
_MOST_BARS = 40
_MOST_LINES = 10
_BESIDES = "needed besides tensors"


def write_plot(path: Path, rows: Sequence[Row], swept: Sequence[str]) -> bool:
    """Write a picture as PNG: with several numbers of workers lines over them, else bars, in the order of the rows.

    Returns:
        False: there is nothing to show.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in rows if not row.forecast.error]
    if not rows:
        return False
    several = len({row.forecast.num_workers for row in rows}) > 1
    figure = over_workers(pyplot, rows, swept) if several else stacked(pyplot, rows, swept)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


def over_workers(pyplot: Any, rows: Sequence[Row], swept: Sequence[str]) -> Any:
    """Return a figure of needs, and of predicted speeds if one is known, with a line for each of the first settings."""
    table, unit, speeds = _table(rows, swept, without=WORKERS)
    figure, axes = pyplot.subplots(
        1, 1 + bool(speeds), figsize=(7 + 5 * bool(speeds), 4.5), squeeze=False, constrained_layout=True
    )
    for name, points in list(table.sort_values("workers").groupby(level=0, sort=False))[:_MOST_LINES]:
        axes[0, 0].plot(points["workers"], points["needed"], marker=".", label=name)
        if speeds:
            (line,) = axes[0, 1].plot(points["workers"], points["rate"], marker=".", label=name)
            axes[0, 1].fill_between(
                points["workers"], points["low"], points["high"], color=line.get_color(), alpha=0.12
            )
    for capacity in table["capacity"].dropna().unique():
        axes[0, 0].axhline(capacity, color="black", linewidth=0.8)
    workers = sorted(set(table["workers"]))
    for axis, label in zip(axes[0], (f"{unit} needed on a device", speeds), strict=False):
        axis.set(xscale="log", xlabel="workers", ylabel=label)
        axis.set_xticks(workers, [str(count) for count in workers])
        axis.minorticks_off()
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", fontsize=8)
    return figure


def stacked(pyplot: Any, rows: Sequence[Row], swept: Sequence[str]) -> Any:
    """Return a figure of the first forty settings in the order of the table.

    It shows the parts of each peak, what the setting needs, and its predicted speed if one is known.
    """
    shown = rows[:_MOST_BARS]
    table, unit, speeds = _table(shown, swept)
    figure, axes = pyplot.subplots(
        1, 1 + bool(speeds), figsize=(11 + 4 * bool(speeds), 1.8 + 0.28 * len(shown)), sharey=True, squeeze=False,
        constrained_layout=True,
    )  # fmt: skip
    memory = axes[0, 0]
    parts = table[[*COLUMNS, *([_BESIDES] if table[_BESIDES].any() else [])]]
    parts.plot.barh(stacked=True, ax=memory, legend=False, width=0.8, color=[*(f"C{i}" for i in range(6)), "lightgray"])
    for place, capacity in enumerate(table["capacity"].dropna().unique()):
        memory.axvline(capacity, color="black", linewidth=1.2, label="" if place else "capacity")
    memory.invert_yaxis()
    memory.set(xlabel=f"{unit} of one device", ylabel="")
    memory.tick_params("y", labelsize=8)
    figure.legend(loc="outside upper left", fontsize=8, ncols=8)
    if speeds:
        error = [table["rate"] - table["low"], table["high"] - table["rate"]]
        axes[0, 1].barh(range(len(table)), table["rate"], color="C0", xerr=error, ecolor="gray", capsize=2)
        axes[0, 1].set_xlabel(speeds)
    if len(shown) < len(rows):
        figure.suptitle(
            f"the first {len(shown)} of {len(rows)} settings, in the table's order", x=0.99, ha="right", fontsize=9
        )
    return figure


def _table(rows: Sequence[Row], swept: Sequence[str], without: str = "") -> tuple[pd.DataFrame, str, str]:
    """Return a row for each forecast, named by its values; the unit of memory; and what speeds are, "" without any."""
    import pandas as pd

    unit, divisor = unit_of([row.forecast for row in rows])
    names, lines = [], []
    for row in rows:
        forecast, speed = row.forecast, row.forecast.speed
        values = zip(swept, row.settings, strict=True)
        names.append(words({key: value for key, value in values if key != without}))
        line = {name: forecast.of(categories) / divisor for name, categories in COLUMNS.items()}
        line |= {"workers": forecast.num_workers, "needed": forecast.needed_bytes / divisor}
        line |= {_BESIDES: sum(forecast.allowances.values()) / divisor}
        line |= {"capacity": float(forecast.capacity_bytes or "nan") / divisor}
        if speed is not None:
            each = (speed.tokens or 1) * speed.samples / forecast.num_workers
            line |= {"rate": each / speed.step_s, "low": each / speed.high_s, "high": each / speed.low_s}
        lines.append(line)
    known = [row.forecast.speed for row in rows if row.forecast.speed]
    items = "tokens" if any(speed.tokens for speed in known) else "samples"
    return pd.DataFrame(lines, index=names), unit, f"predicted {items}/s per device" if known else ""
