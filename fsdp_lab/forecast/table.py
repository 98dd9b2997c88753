"""Forecasts as a table for people, and as CSV for programs. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_lab.config.wording import four_digits
from fsdp_lab.forecast.capacity import Forecast
from fsdp_lab.forecast.cost import Cost, cost_of
from fsdp_lab.forecast.speed.predict import BOUNDS
from fsdp_lab.forecast.words import no_forecast_text
from fsdp_lab.memory.profile import CATEGORIES
from fsdp_lab.report.terminal import Column, FittingTable
from fsdp_lab.storage.files import whole

if TYPE_CHECKING:
    import pandas as pd

    from fsdp_lab.forecast.request import Request

# The memory columns of the table -> their categories.
COLUMNS = {
    "params": ("param",),
    "optimizer": ("optimizer",),
    "grads": ("grad", "unsharded_grad"),
    "gathered": ("unsharded_param", "all_gather"),
    "activations": ("activation",),
    "rest": ("reduce_scatter", "temp", "buffer", "input", "other"),
}
# The settings, `peak`, `needs`, `fits` and `largest microbatch` always stay. The last of these is dropped first.
_DROP_LAST = ("host", "activations", "params", "optimizer", "grads", "gathered", "rest")
# `forecast.solve` -> its column of the frame, and its name and format in the table.
SOLVED: dict[str, tuple[str, str, Callable[[int], str]]] = {
    "batch": ("largest_microbatch", "largest microbatch", "{:,}".format),
    "gpus": ("fewest_workers", "fewest workers", "{:,}".format),
    "capacity": ("least_capacity_bytes", "least GiB", lambda size: f"{size / 2**30:,.2f}"),
}
_USD = ("usd_per_million", "usd_per_million_low", "usd_per_million_high")
# The columns of the frame after the swept keys, and their types; a missing figure is NaN or pd.NA.
_TYPES = {
    "cluster.num_workers": "int64",
    **dict.fromkeys(("device", "data_sheet"), "object"),
    **dict.fromkeys(("peak_bytes", *(f"{name}_bytes" for name in CATEGORIES)), "Int64"),
    **dict.fromkeys(("active_bytes", "reserved_bytes", "least_bytes", "needed_bytes", "host_bytes"), "Int64"),
    **dict.fromkeys((*(f"host_{name}_bytes" for name in CATEGORIES), "capacity_bytes"), "Int64"),
    **{"expandable_segments": "object", "fits": "object", "timeline": "object"},
    **{column: "Int64" for column, *_ in SOLVED.values()},
    **dict.fromkeys(("step_s", "step_low_s", "step_high_s"), "float64"),
    **dict.fromkeys(("samples_per_s_per_device", "tokens_per_s_per_device"), "float64"),
    **dict.fromkeys(("samples_per_s_of_all", "tokens_per_s_of_all", "mfu"), "float64"),
    **{"bound": "object", **dict.fromkeys((f"{name}_share" for name in BOUNDS), "float64")},
    **{"basis": "object", "error_p90": "float64", "ratio_error_p90": "float64", "ratio_group": "object"},
    "usd_unit": "object",
    **dict.fromkeys(_USD, "float64"),
    **{"network_gbit": "float64", "network_assumed": "object", "no_forecast": "object", "no_speed": "object"},
}
MOST_ROWS = 24  # of a table


@dataclass(frozen=True)
class Row:
    """A configuration in the table.

    Attributes:
        settings: the values of the swept keys.
        page: its timeline; None: none was written.
        microbatch: the samples of a microbatch.
        request: of the forecast; None: the forecast was made by hand.
    """

    settings: list[str]
    forecast: Forecast
    page: Path | None = None
    microbatch: int = 0
    request: Request | None = None

    @property
    def cost(self) -> Cost | None:
        return cost_of(self.forecast, self.request.config.forecast) if self.request else None


def in_order(rows: Sequence[Row]) -> list[Row]:
    """Return the rows in the order of the table; rows without a forecast come last.

    With speeds, each number of workers forms a group: first what fits, then what may fit, then what does not, the
    fastest first in each. Without speeds the smallest peak comes first.
    """

    def place(row: Row) -> tuple[float, ...]:
        forecast = row.forecast
        if forecast.error:
            return (1,)
        if forecast.speed is not None:
            room = (forecast.fits is False) + (forecast.fits is False and not forecast.unsure)
            return (0, forecast.num_workers, room, -forecast.speed.samples_per_s)
        return (0, 0, 0, forecast.peak_bytes)

    return sorted(rows, key=place)


def best_rows(rows: Sequence[Row], most: int = MOST_ROWS) -> list[Row]:
    """Return the first rows of each number of workers, at least three each and equally many, about so many in all."""
    of_workers: dict[int, list[Row]] = {}
    for row in rows:
        of_workers.setdefault(row.forecast.num_workers, []).append(row)
    each = max(3, most // len(of_workers))
    kept = {id(row) for some in of_workers.values() for row in some[:each]}
    return [row for row in rows if len(rows) <= most or id(row) in kept]


def forecast_table(rows: Sequence[Row], swept: Sequence[str]) -> FittingTable:
    """Return a table with one line per configuration: a worker's peak, its parts, and whether it fits.

    Values that all rows share are in the title.
    """
    import pandas as pd

    frame = forecasts_frame(rows, swept)
    unit, divisor = unit_of([row.forecast for row in rows])
    workers, capacities = frame["cluster.num_workers"].unique(), frame["capacity_bytes"].dropna().unique()
    columns = [Column(key, list(frame[key].astype(str)), is_axis=True, justify="left") for key in swept]

    def add(name: str, values: Iterable[Any], text: Callable[[Any], str], none: str = "") -> None:
        cells = [none if pd.isna(value) else text(value) for value in values]
        columns.append(Column(name, cells, drop=1 + _DROP_LAST.index(name) if name in _DROP_LAST else 0))

    def size(num_bytes: int) -> str:
        return f"{num_bytes / divisor:,.2f}"

    def add_bytes(name: str, sizes: pd.Series[int], none: str = "") -> None:
        if any(size(one) != size(0) for one in sizes.dropna()):  # a column of zeros says nothing
            add(name, sizes, size, none)

    if len(workers) > 1 and "cluster.num_workers" not in swept:
        add("workers", frame["cluster.num_workers"], str)
    add_bytes("peak", frame["peak_bytes"], none="none")
    for name, parts in COLUMNS.items():
        add_bytes(name, frame[[f"{part}_bytes" for part in parts]].sum(axis=1, skipna=False))
    if any(row.forecast.allowances for row in rows):
        needs = frame["needed_bytes"].map(size, "ignore").astype(object)
        caches = (frame["fits"] == "unsure") & (frame["least_bytes"] < frame["needed_bytes"])
        needs[caches] = frame["least_bytes"][caches].map(size).astype(object) + " to " + needs[caches]
        add("needs", needs, str)
    add_bytes("host", frame["host_bytes"])
    if len(capacities) > 1:
        add_bytes("capacity", frame["capacity_bytes"])
    if len(capacities):
        add("fits", frame["fits"].replace({"true": "yes", "false": "no"}), str)
    if frame["step_s"].notna().any():
        add("step ms", frame["step_s"] * 1e3, four_digits)
        if (tokens := frame["tokens_per_s_per_device"]).notna().any():
            add("tokens/s per device", tokens, "{:,.0f}".format)
        else:
            add("samples/s per device", frame["samples_per_s_per_device"], four_digits)
        if (usd := frame["usd_per_million"]).notna().any():
            add(f"$ per million {frame['usd_unit'].dropna().iloc[0]}", usd, four_digits)
        if frame["mfu"].notna().any():
            add("MFU", frame["mfu"] * 100, "{:.0f} %".format)
        add("bound", frame["bound"], str)
    for column, title, form in SOLVED.values():
        if (found := frame[column]).notna().any():
            nothing = found.eq(0).fillna(False)
            cells = found.map(form, "ignore").astype(object).mask(nothing, "none")
            add(title, cells.mask(nothing & (frame["fits"] == "unsure"), "unsure"), str)
    of = f"one of {max(workers):,} workers" if len(workers) == 1 and max(workers) > 1 else "one worker"
    return FittingTable(columns, f"forecast peak of {of}, {unit}", "forecast.csv")


def unit_of(having: Sequence[Forecast]) -> tuple[str, int]:
    """Return the unit of a table of these forecasts, by its largest value, and the unit's bytes."""
    highest = max((max(one.needed_bytes, one.host_bytes) for one in having if not one.error), default=0)
    return ("GiB", 2**30) if highest >= 10 * 2**30 else ("MiB", 2**20)


def write_csv(path: Path, rows: Sequence[Row], swept: Sequence[str]) -> None:
    with whole(path) as making:
        forecasts_frame(rows, swept).to_csv(making, index=False)


def forecasts_frame(rows: Sequence[Row], swept: Sequence[str]) -> pd.DataFrame:
    """Return one row per configuration: its swept values as typed, then its figures in bytes, seconds, samples/s."""
    import pandas as pd

    figures = [dict(zip(swept, row.settings, strict=True)) | _figures(row) for row in rows]
    return pd.DataFrame(figures, columns=[*dict.fromkeys([*swept, *_TYPES])]).astype(_TYPES)


def _figures(row: Row) -> dict[str, Any]:
    forecast = row.forecast
    figures: dict[str, Any] = {
        "cluster.num_workers": forecast.num_workers,
        "device": "cuda" if forecast.cuda else "cpu",
        "data_sheet": forecast.data_sheet,
        "timeline": row.page and str(row.page),
        "no_forecast": no_forecast_text(forecast.error),
        "no_speed": forecast.no_speed,
    }
    if forecast.error:
        return figures
    host = forecast.peaks.get("host", {})
    figures |= {f"{name}_bytes": forecast.peaks["device"].get(name, 0) for name in CATEGORIES}
    figures |= {f"host_{name}_bytes": host.get(name, 0) for name in CATEGORIES}
    same = ("peak", "active", "reserved", "least", "needed", "host", "capacity")
    figures |= {f"{name}_bytes": getattr(forecast, f"{name}_bytes") for name in same}
    figures |= {"expandable_segments": str(forecast.expandable).lower() if forecast.cuda else None}
    figures |= {"fits": _whether(forecast)}
    if forecast.solved:
        figures[SOLVED[forecast.solved.name][0]] = forecast.solved.value
    if (speed := forecast.speed) is None:
        return figures
    rates, network = {"samples": speed.samples_per_s, "tokens": speed.tokens_per_s}, speed.network
    return figures | {
        **{"step_s": speed.step_s, "step_low_s": speed.low_s, "step_high_s": speed.high_s},
        **{f"{name}_per_s_per_device": rate and rate / forecast.num_workers for name, rate in rates.items()},
        **{f"{name}_per_s_of_all": rate for name, rate in rates.items()},
        **{"mfu": speed.mfu, "bound": speed.bound, "basis": str(speed.basis)},
        **{f"{name}_share": round(speed.shares.get(name, 0.0), 4) for name in BOUNDS},
        **{"error_p90": speed.error, "ratio_error_p90": speed.relative, "ratio_group": speed.group},
        **({"usd_unit": cost.unit} if (cost := row.cost) and cost.usd else {}),
        **(dict(zip(_USD, cost.usd, strict=False)) if cost else {}),
        "network_gbit": network and network.gbit,
        "network_assumed": network and str(bool(network.steps)).lower(),
    }


def _whether(forecast: Forecast) -> str | None:
    """Return whether it fits, in the words of the CSV; None: the capacity is not known."""
    return None if forecast.fits is None else "true" if forecast.fits else "unsure" if forecast.unsure else "false"
