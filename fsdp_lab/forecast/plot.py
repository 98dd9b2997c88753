"""A picture of many forecasts: the needs of each over the number of workers, or the parts of each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdp_lab.forecast.table import COLUMNS, Row, unit_of
from fsdp_lab.record.trial import words

WORKERS = "cluster.num_workers"
GIB = 2**30
_MOST_BARS = 40
_MOST_LINES = 10


def write_plot(path: Path, rows: Sequence[Row], swept: Sequence[str]) -> bool:
    """Write a picture as PNG.

    With several numbers of workers it has lines: the first two other keys are colour and dash, the rest are panels.
    Otherwise it has stacked bars, in the order of the rows.

    Returns:
        False: there is nothing to show.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in rows if not row.forecast.error]
    if not rows:
        return False
    figure = _over_workers(pyplot, rows, swept) if WORKERS in swept else stacked(pyplot, rows, swept)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


def write_scaling(path: Path, rows: Sequence[Row], swept: Sequence[str]) -> bool:
    """Write the predicted speed over the number of workers as PNG, a line for each setting of the other keys.

    Returns:
        False: no speed was predicted, or there is only one number of workers.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    speeds = [(row, row.forecast.speed) for row in rows if row.forecast.speed and not row.forecast.error]
    workers = sorted({row.forecast.num_workers for row, _ in speeds})
    if len(workers) < 2:
        return False
    lines: dict[str, list[tuple[float, ...]]] = {}
    for row, speed in speeds:
        values = zip(swept, row.settings, strict=True)
        name = words({key: value for key, value in values if key != WORKERS})
        items = (speed.tokens or 1) * speed.samples / row.forecast.num_workers
        each = (items / seconds for seconds in (speed.step_s, speed.high_s, speed.low_s))
        lines.setdefault(name, []).append((row.forecast.num_workers, *each))
    figure, axis = pyplot.subplots(figsize=(8, 4.5), constrained_layout=True)
    for name, points in list(lines.items())[:_MOST_LINES]:
        counts, rates, low, high = zip(*sorted(points), strict=True)
        (line,) = axis.plot(counts, rates, marker=".", label=name)
        axis.fill_between(counts, low, high, color=line.get_color(), alpha=0.12)
    unit = "tokens" if speeds[0][1].tokens else "samples"
    axis.set(xscale="log", xlabel="workers", ylabel=f"predicted {unit}/s per device")
    axis.set_xticks(workers, [str(count) for count in workers])
    axis.minorticks_off()
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


def _over_workers(pyplot: Any, rows: Sequence[Row], swept: Sequence[str]) -> Any:
    others = [key for key in swept if key != WORKERS]
    line_keys, panel_keys = others[:1] + others[-1:] if len(others) > 1 else others, others[1:-1]
    values = {id(row): dict(zip(swept, row.settings, strict=True)) for row in rows}

    def chosen(row: Row, keys: Sequence[str]) -> tuple[str, ...]:
        return tuple(values[id(row)][key] for key in dict.fromkeys(keys))

    panels = sorted({chosen(row, panel_keys) for row in rows})
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(4.6 * columns + 2, 3.4 * lines + 0.6), sharex=True, sharey=True, squeeze=False,
        constrained_layout=True,
    )  # fmt: skip
    colours = {value: f"C{i}" for i, value in enumerate(dict.fromkeys(chosen(row, line_keys[:1]) for row in rows))}
    dashes = dict.fromkeys(chosen(row, line_keys[1:]) for row in rows)
    styles = {value: ("-", "--", ":", "-.")[i % 4] for i, value in enumerate(dashes)}
    for axis, panel in zip(axes.flat, panels, strict=False):
        inside = [row for row in rows if chosen(row, panel_keys) == panel]
        for key in sorted({chosen(row, line_keys) for row in inside}):
            points = sorted(
                (row.forecast.num_workers, row.forecast.needed_bytes / GIB)
                for row in inside
                if chosen(row, line_keys) == key
            )
            label = " ".join(key)
            axis.plot(*zip(*points, strict=True), styles[key[1:]], color=colours[key[:1]], marker=".", label=label)
        capacity = inside[0].forecast.capacity_bytes
        if capacity:
            axis.axhline(capacity / GIB, color="black", linewidth=0.8)
            axis.annotate(f"capacity {capacity / GIB:g} GiB", (1, capacity / GIB), va="bottom", fontsize=8)
        axis.set(xscale="log", title=" ".join(f"{k}={v}" for k, v in zip(panel_keys, panel, strict=True)))
        ticks = sorted({row.forecast.num_workers for row in rows})
        axis.set_xticks(ticks, [str(tick) for tick in ticks])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes.flat[0].set_ylim(bottom=0)  # of all, once everything is drawn
    for axis in list(axes.flat)[len(panels) :]:
        axis.axis("off")
    for axis in axes[-1]:
        axis.set_xlabel("workers")
    for axis in axes[:, 0]:
        axis.set_ylabel("GiB needed on a device")
    named = {
        label: handle for axis in axes.flat for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(named.values(), named.keys(), loc="outside right upper", title=" ".join(line_keys), fontsize=8)
    return figure


def stacked(pyplot: Any, rows: Sequence[Row], swept: Sequence[str]) -> Any:
    """Return a figure of the first forty settings in the order of the table.

    It shows the parts of each peak, what the setting needs, and its predicted speed if one is known.
    """
    shown = rows[:_MOST_BARS]
    speeds = any(row.forecast.speed for row in shown)
    figure, axes = pyplot.subplots(
        1, 1 + speeds, figsize=(11 + 4 * speeds, 1.8 + 0.28 * len(shown)), sharey=True, squeeze=False,
        constrained_layout=True,
    )  # fmt: skip
    axis = axes[0, 0]
    unit, divisor = unit_of([row.forecast for row in shown])
    _memory_bars(axis, shown, divisor)
    axis.set_yticks(
        range(len(shown)), [words(dict(zip(swept, row.settings, strict=True))) for row in shown], fontsize=8
    )
    axis.invert_yaxis()
    axis.set_xlabel(f"{unit} of one device")
    figure.legend(loc="outside upper left", fontsize=8, ncols=8)
    if speeds:
        _speed_bars(axes[0, 1], shown)
    if len(shown) < len(rows):
        figure.suptitle(
            f"the first {len(shown)} of {len(rows)} settings, in the table's order", x=0.99, ha="right", fontsize=9
        )
    return figure


def _memory_bars(axis: Any, rows: Sequence[Row], divisor: int) -> None:
    """Draw the peak by category, the device's allowances, and a line for its capacity."""
    left = [0.0] * len(rows)
    for name, categories in COLUMNS.items():
        widths = [sum(row.forecast.peaks["device"].get(c, 0) for c in categories) / divisor for row in rows]
        axis.barh(range(len(rows)), widths, left=left, label=name)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    if any(row.forecast.allowances for row in rows):
        more = [sum(row.forecast.allowances.values()) / divisor for row in rows]
        axis.barh(range(len(rows)), more, left=left, color="lightgray", label="needed besides tensors")
    capacities = sorted({row.forecast.capacity_bytes for row in rows if row.forecast.capacity_bytes is not None})
    for place, capacity in enumerate(capacities):
        axis.axvline(capacity / divisor, color="black", linewidth=1.2, label="" if place else "capacity")


def _speed_bars(axis: Any, rows: Sequence[Row]) -> None:
    """Draw the predicted speed of a device with its range, in the order of the other bars."""
    known = [(place, row.forecast.num_workers, row.forecast.speed) for place, row in enumerate(rows)]
    for place, workers, speed in known:
        if speed is not None:
            items = (speed.tokens or 1) * speed.samples / workers
            rate, low, high = (items / seconds for seconds in (speed.step_s, speed.high_s, speed.low_s))
            axis.barh(place, rate, color="C0", xerr=[[rate - low], [high - rate]], ecolor="gray", capsize=2)
    unit = "tokens" if any(speed is not None and speed.tokens for *_, speed in known) else "samples"
    axis.set_xlabel(f"predicted {unit}/s per device")
