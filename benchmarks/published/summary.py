"""A line for each published row, and how its errors compare with the targets."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.published.rows import Row

MOST_MEDIAN, MOST_P90, LEAST_INSIDE, WIDEST = 0.03, 0.10, 0.9, 0.20
MOST_MEMORY_MEDIAN, MOST_MEMORY = 0.05, 0.10
COLUMNS = (
    "row", "model", "gpu", "gpus", "gbit", "marks", "measured_s", "forecast_s", "error", "low_s", "high_s", "inside",
    "reserved_gib", "forecast_gib", "memory_error", "share", "fits",
)  # fmt: skip


@dataclass(frozen=True)
class Result:
    """A published row and its forecast.

    Attributes:
        row: as published.
        step_s: predicted.
        low_s: the lower end of its range.
        high_s: the upper end.
        reserved_gib: forecast; None: the step has so much room that it was not followed.
        share: of the GPU's memory that the step needs; None: little.
        fits: `yes`, `tight` or `no`.
    """

    row: Row
    step_s: float
    low_s: float
    high_s: float
    reserved_gib: float | None
    share: float | None
    fits: str

    @property
    def error(self) -> float:
        """Of the predicted time, relative to the measured one."""
        return self.step_s / self.row.measured_s - 1

    @property
    def inside(self) -> bool:
        """Whether the measured time is within the range."""
        return self.low_s <= self.row.measured_s <= self.high_s

    @property
    def width(self) -> float:
        """How far the range reaches from the prediction, as a share of the end that is farther away."""
        return max(1 - self.step_s / self.high_s, self.step_s / self.low_s - 1)

    @property
    def memory_error(self) -> float | None:
        """Of the forecast reserved memory; None: it was not published."""
        if self.row.reserved_gib is None or self.reserved_gib is None:
            return None
        return self.reserved_gib / self.row.reserved_gib - 1

    @property
    def network_known(self) -> bool:
        """Whether the network is stated, or there is one node."""
        return self.row.device.network_known or not self.row.several_nodes

    def cells(self) -> list[str]:
        """Return the values of `COLUMNS`."""
        row, memory = self.row, self.memory_error
        gbit = "" if not row.several_nodes else f"{row.device.network_gbit:g}" if self.network_known else "?"
        return [
            row.name, row.model, row.gpu, str(row.workers), gbit, " ".join(row.marks), f"{row.measured_s:.4g}",
            f"{self.step_s:.4g}", f"{self.error:+.1%}", f"{self.low_s:.4g}", f"{self.high_s:.4g}",
            "yes" if self.inside else "no", "" if memory is None else f"{row.reserved_gib:.1f}",
            "" if self.reserved_gib is None else f"{self.reserved_gib:.1f}", "" if memory is None else f"{memory:+.1%}",
            "" if self.share is None else f"{self.share:.3f}", self.fits,
        ]  # fmt: skip


def write_rows(path: Path, results: Sequence[Result]) -> None:
    """Write a line for each row as CSV."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(COLUMNS)
        lines.writerows(result.cells() for result in results)


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    rows = [list(head), ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in rows)


def summary(results: Sequence[Result]) -> tuple[str, bool]:
    """Return what the rows show against the targets, and whether all are met."""
    judged: list[tuple[str, str, str, bool | None]] = []
    known = [one for one in results if one.network_known]
    eager = [one for one in known if not {"compiled", "float8"} & set(one.row.marks)]
    groups = {
        "MPT, stated network or one node": [one for one in known if one.row.fitted],
        "other eager rows, stated network or one node": [one for one in eager if not one.row.fitted],
        "compiled and float8 rows": [one for one in known if one not in eager],
        "all rows with a stated network or one node": known,
    }
    for name, some in groups.items():
        judged += _speed(name, some, counts=some is known)
    unknown = [one for one in results if not one.network_known]
    judged.append(_inside("network not stated", unknown, 1.0))
    for name, compiled in (("eager", False), ("compiled", True)):
        some = [one for one in results if ("compiled" in one.row.marks) is compiled]
        judged += _memory(name, some)
    refused = [one.row.name for one in results if one.fits == "no"]
    judged.append(("rows that ran and are forecast not to fit", "none", ", ".join(refused) or "none", not refused))
    lines = [[what, target, found, _verdict(good)] for what, target, found, good in judged]
    return table(["", "target", "found", "met"], lines), all(good is not False for *_, good in judged)


def _verdict(good: bool | None) -> str:
    return "" if good is None else "yes" if good else "no"


def _speed(name: str, some: Sequence[Result], counts: bool) -> list[tuple[str, str, str, bool | None]]:
    errors = np.abs([one.error for one in some])
    median, p90 = float(np.median(errors)), float(np.quantile(errors, 0.9))
    widest = max(some, key=lambda one: one.width)
    text = f"{median:.1%}, {p90:.1%}, worst {errors.max():.1%}"
    ranges = f"{widest.width:.1%} ({widest.row.name})"
    of = f"{name} ({len(some)})"
    return [
        (f"{of}: median, 90 %", "3 %, 10 %", text, (median <= MOST_MEDIAN and p90 <= MOST_P90) if counts else None),
        _inside(of, some, LEAST_INSIDE if counts else None),
        (f"{of}: widest range", "20 %", ranges, widest.width <= WIDEST if counts else None),
    ]


def _inside(name: str, some: Sequence[Result], least: float | None) -> tuple[str, str, str, bool | None]:
    inside = sum(one.inside for one in some)
    outside = ", ".join(one.row.name for one in some if not one.inside)
    found = f"{inside} of {len(some)}{f'; outside: {outside}' if outside else ''}"
    target = "" if least is None else "all" if least == 1 else f"{least:.0%}"
    return f"{name}: inside their range", target, found, None if least is None else inside >= least * len(some)


def _memory(name: str, results: Sequence[Result]) -> list[tuple[str, str, str, bool | None]]:
    errors = {one.row.name: one.memory_error for one in results if one.memory_error is not None}
    if not errors:
        return []
    median = float(np.median(np.abs(list(errors.values()))))
    worst = max(errors, key=lambda row: abs(errors[row]))
    found = f"{median:.1%}, worst {errors[worst]:+.1%} ({worst})"
    good = median <= MOST_MEMORY_MEDIAN and abs(errors[worst]) <= MOST_MEMORY
    return [(f"reserved memory, {name} ({len(errors)}): median, worst", "5 %, 10 %", found, good)]
