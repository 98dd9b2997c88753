"""The speed of all workers and of each, by the number of workers. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from fsdp_lab.forecast.answer import BATCH, WORKERS, ForecastAnswer, samples_per_s
from fsdp_lab.forecast.table import Row


@dataclass(frozen=True)
class Point:
    """The recommended setting of a number of workers.

    Attributes:
        name: of the setting; "": the same with each number, or there is one.
        times: its total speed over that of the fewest workers.
        slower_than: fewer workers with a higher total speed; None: there are none.
        before: the recommended setting of the next fewer workers; None: these are the fewest.
        lost: the share of a device's speed that is lost against `before`.
    """

    row: Row
    name: str = ""
    times: float = 1.0
    slower_than: int | None = None
    before: Row | None = None
    lost: float = 0.0

    @property
    def workers(self) -> int:
        return self.row.forecast.num_workers

    @property
    def total(self) -> float:
        """Samples/s of all workers."""
        return samples_per_s(self.row)


@dataclass(frozen=True)
class Series:
    """Numbers of workers whose speeds are compared, the fewest first.

    Attributes:
        others: what else was varied, and has one value here.
        microbatches: samples that a worker takes at once; several: the steps are unequal.
        enough: more workers bring no more total speed; None: the most are the fastest.
    """

    others: dict[str, str]
    points: list[Point]
    microbatches: list[int]
    enough: int | None


def series_of(made: Sequence[ForecastAnswer], tolerance: float) -> list[Series]:
    """Return a comparison for each device and microbatch, or for each batch size where microbatches differ.

    Args:
        tolerance: `report.speed_tolerance`: the share by which a total speed has to be higher.
    """
    fitting = [one for one in made if one.best is not None and WORKERS in one.where]
    able = [one for one in fitting if one.best and one.best.forecast.speed is not None]
    equal, of_one_batch = _grouped(able, microbatch=True), _grouped(able, microbatch=False)
    return [_series(some, tolerance) for some in equal or of_one_batch]


def _grouped(able: Sequence[ForecastAnswer], microbatch: bool) -> list[list[ForecastAnswer]]:
    """Return those with several numbers of workers, and everything else alike."""
    groups: dict[tuple[object, ...], list[ForecastAnswer]] = {}
    for one in able:
        left = {WORKERS, BATCH} if microbatch else {WORKERS}
        alike = [(key, value) for key, value in one.where.items() if key not in left]
        groups.setdefault((*alike, one.best.microbatch if microbatch and one.best else 0), []).append(one)
    return [some for some in groups.values() if len(some) > 1]


def _series(some: Sequence[ForecastAnswer], tolerance: float) -> Series:
    ordered = sorted(some, key=lambda one: one.least.forecast.num_workers)
    rows = [one.best for one in ordered if one.best is not None]
    names = [one.recommendation.setting.name if one.recommendation.setting else "" for one in ordered]
    points = [Point(rows[0])]
    for before, row in pairwise(rows):
        each, each_before = (samples_per_s(r) / r.forecast.num_workers for r in (row, before))
        fastest = max(points, key=lambda point: samples_per_s(point.row))
        slower_than = fastest.workers if samples_per_s(row) < samples_per_s(fastest.row) else None
        times = samples_per_s(row) / samples_per_s(rows[0])
        points.append(Point(row, "", times, slower_than, before, 1 - each / each_before))
    if len(set(names)) > 1:
        points = [replace(point, name=name) for point, name in zip(points, names, strict=True)]
    paying = points[0]
    for point in points[1:]:
        paying = point if point.total > paying.total * (1 + tolerance) else paying
    alike = {key: value for key, value in ordered[0].where.items() if key != WORKERS}
    sizes = sorted({row.microbatch for row in rows}, reverse=True)
    others = alike if len(sizes) > 1 else {key: value for key, value in alike.items() if key != BATCH}
    enough = paying.workers if paying is not points[-1] else None
    return Series(others, points, sizes, enough)
