"""The errors of forecasts over sources, the figures of the devices' files, and how they compare with the targets."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np

from benchmarks.published.fit import FAMILIES
from benchmarks.published.rows import Row
from fsdp_lab.forecast.speed.device import OTHER, PROBED, Errors, KnownError

FEW = 3  # sources: of fewer, the range is the widest known
MOST_SPEED = {"eager": 0.08, "compiled": 0.12, "float8": 0.12}  # of the median over sources
MOST_MEMORY = {"eager": 0.06, "compiled": 0.10, "float8": 0.10}
MOST_OF_DEVICE, LEAST_INSIDE, WIDEST = 0.25, 0.9, 0.30
COLUMNS = (
    "row", "source", "model", "gpu", "gpus", "gbit", "kinds", "marks", "unscored", "measured_s", "forecast_s", "error",
    "low_s", "high_s", "inside", "measured_gib", "forecast_gib", "memory_error", "share", "fits",
)  # fmt: skip
Table = list[tuple[str, str, str, bool | None]]  # what, its target, what was found, and whether that is good enough


@dataclass(frozen=True)
class Result:
    """A published row and its forecast, by efficiencies that were fitted without its source.

    Attributes:
        row: as published.
        step_s: predicted.
        memory_gib: forecast, of what was published; None: the step has so much room that it was not followed.
        share: of the GPU's memory that the step needs; None: little.
        fits: `yes`, `unsure` or `no`.
        alone: no other source has its device, so the efficiencies are those of another.
        low_s: the lower end of its range.
        high_s: the upper end.
    """

    row: Row
    step_s: float
    memory_gib: float | None
    share: float | None
    fits: str
    alone: bool = False
    low_s: float = 0.0
    high_s: float = float("inf")

    @property
    def kinds(self) -> list[str]:
        """As of `Errors`; none of a row whose network is not stated: its range covers half and twice of a guess."""
        return [self.row.kind, *(["several_nodes"] * self.row.several_nodes)] if self.row.has_speed else []

    @property
    def error(self) -> float:
        """Of the predicted time, relative to the measured one; NaN: it was not published."""
        return self.step_s / (self.row.measured_s or math.nan) - 1

    @property
    def inside(self) -> bool:
        """Whether the measured time is within the range, or was not published."""
        return self.row.measured_s is None or self.low_s <= self.row.measured_s <= self.high_s

    @property
    def width(self) -> float:
        """How far the range reaches from the prediction, as a share of the prediction."""
        return max(self.high_s / self.step_s - 1, 1 - self.low_s / self.step_s)

    @property
    def memory_error(self) -> float | None:
        """Of the forecast reserved or allocated memory; None: neither was published."""
        if self.measured_gib is None or self.memory_gib is None:
            return None
        return self.memory_gib / self.measured_gib - 1

    @property
    def measured_gib(self) -> float | None:
        """Reserved memory as published, or allocated memory."""
        return self.row.allocated_gib if self.row.reserved_gib is None else self.row.reserved_gib

    def cells(self) -> list[str]:
        """Return the values of `COLUMNS`."""
        row, memory = self.row, self.memory_error
        gbit = "" if not row.several_nodes else f"{row.device.network_gbit:g}" if row.network_known else "?"
        return [
            row.name, row.source, row.model, row.gpu, str(row.workers), gbit, " ".join(self.kinds), " ".join(row.marks),
            row.unscored, *([f"{row.measured_s:.4g}", f"{self.step_s:.4g}", f"{self.error:+.1%}", f"{self.low_s:.4g}",
            f"{self.high_s:.4g}", "yes" if self.inside else "no"] if row.measured_s else [""] * 6),
            "" if self.measured_gib is None else f"{self.measured_gib:.1f}",
            "" if self.memory_gib is None else f"{self.memory_gib:.1f}", "" if memory is None else f"{memory:+.1%}",
            "" if self.share is None else f"{self.share:.3f}", self.fits,
        ]  # fmt: skip


def known_error(errors: Iterable[tuple[str, float]]) -> KnownError | None:
    """Return the error over sources, each of which counts once; None without any.

    Args:
        errors: of rows, with their sources.
    """
    of_source: dict[str, list[float]] = {}
    for source, error in errors:
        of_source.setdefault(source, []).append(abs(error))
    if not of_source:
        return None
    median = float(np.median([np.median(some) for some in of_source.values()]))
    # of rows that each have a share of their source's weight
    weighed = sorted((error, 1 / len(some) / len(of_source)) for some in of_source.values() for error in some)
    reached = np.cumsum([weight for _, weight in weighed])
    p90 = weighed[int(np.searchsorted(reached, 0.9 - 1e-9))][0]
    return KnownError(round(median, 3), math.ceil(p90 * 1000) / 1000, len(of_source))


def speed_error(results: Sequence[Result], kind: str = "", gpus: Sequence[str] = ()) -> KnownError | None:
    """Return the error of a kind's steps, or of all, on some GPUs, or on all that more than one source has."""
    some = [one for one in results if one.row.gpu in gpus or not (gpus or one.alone)]
    return known_error((one.row.source, one.error) for one in some if (kind in one.kinds if kind else one.kinds))


def memory_error(results: Sequence[Result], kind: str) -> KnownError | None:
    """Return the error of memory, reserved or allocated."""
    some = [(one.row.source, one.memory_error) for one in results if one.row.kind == kind]
    return known_error((source, error) for source, error in some if error is not None)


def errors_of(results: Sequence[Result]) -> dict[str, Errors]:
    """Return the errors of each family's file. Of few sources, and of any other step, the range is the widest known.

    The rows of a device that one source has alone were forecast by the efficiencies of another, with larger errors:
    nothing else is known of such a device.
    """
    kinds = [each.name for each in fields(Errors) if each.name not in (OTHER, PROBED)]  # a probe writes its own
    known = [speed_error(results, kind) for kind in kinds]
    widest = max((one for one in known if one and one.sources >= FEW), key=lambda one: one.p90)
    errors = {}
    for family, gpus in FAMILIES.items():
        own = {kind: one for kind in kinds if (one := speed_error(results, kind, gpus)) is not None}
        ranges = {
            kind: one if one.sources >= FEW else replace(one, p90=max(one.p90, widest.p90)) for kind, one in own.items()
        }
        other = max([widest, *ranges.values()], key=lambda one: one.p90)
        errors[family] = Errors(replace(other, sources=0), **ranges)
    return errors


def write_rows(path: Path, results: Sequence[Result]) -> None:
    """Write a line for each row as CSV."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(COLUMNS)
        lines.writerows(one.cells() for one in results)


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    rows = [list(head), ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in rows)


def summary(results: Sequence[Result]) -> tuple[str, bool]:
    """Return what the rows show against the targets, and whether all are met. Only scored rows count."""
    scored = [one for one in results if not one.row.unscored]
    judged: Table = []
    for kind, most in MOST_SPEED.items():
        judged.append(_error(f"speed, {kind}", speed_error(scored, kind), most))
    judged.append(_error("speed, several nodes", speed_error(scored, "several_nodes"), None))
    for gpu in dict.fromkeys(one.row.gpu for one in scored):
        alone = ", which no other source has" * any(one.alone for one in scored if one.row.gpu == gpu)
        judged.append(_error(f"speed, {gpu}{alone}", speed_error(scored, gpus=[gpu]), MOST_OF_DEVICE))
    for kind, most in MOST_MEMORY.items():
        judged.append(_error(f"memory, {kind}", memory_error(scored, kind), most))
    other = [one for one in scored if not one.alone and one.row.measured_s]
    outside = [one.row.name for one in other if not one.inside]
    widest = max((one for one in other if one.row.has_speed), key=lambda one: one.width)
    inside, missed = len(other) - len(outside), ", ".join(outside) or "none"
    found = f"{inside} of {len(other)}; outside: {missed}"
    judged.append(("rows inside their range", "9 of 10", found, inside >= LEAST_INSIDE * len(other)))
    judged.append(
        (
            "widest range with a known network",
            "30 %",
            f"{widest.width:.0%} ({widest.row.name})",
            widest.width <= WIDEST + 5e-3,
        )
    )
    for what, wrong in {
        "rows that ran and are forecast not to fit": [one for one in results if one.row.ran and one.fits == "no"],
        "rows out of memory that are forecast to fit": [o for o in results if not o.row.ran and o.fits == "yes"],
    }.items():
        judged.append((what, "none", ", ".join(one.row.name for one in wrong) or "none", not wrong))
    lines = [[what, target, found, _verdict(good)] for what, target, found, good in judged]
    return table(["", "target", "found", "met"], lines), all(good is not False for *_, good in judged)


def _verdict(good: bool | None) -> str:
    return "" if good is None else "yes" if good else "no"


def _error(what: str, known: KnownError | None, most: float | None) -> tuple[str, str, str, bool | None]:
    target = f"median {most:.0%}" if most else ""
    if known is None:
        return what, target, "no row", None
    sources = f"{known.sources} source{'s' if known.sources > 1 else ''}"
    found = f"median {known.median:.1%}, nine of ten {known.p90:.1%}, {sources}"
    return what, target, found, known.median <= most if most else None


def named(reasons: Mapping[str, str]) -> list[str]:
    """Return which rows a reason has: name -> reason."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    return [f"- {_several(some)}: {reason}." for reason, some in names.items()]


def _several(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) < 12 else f"{names[0]} to {names[-1]} ({len(names)} rows)"
