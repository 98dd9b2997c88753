"""Total speed and speed per worker, by the number of workers. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_lab.forecast.answer import BATCH, WORKERS, ForecastAnswer, samples_per_s
from fsdp_lab.forecast.table import Row


@dataclass(frozen=True)
class Series:
    """The recommended settings for several numbers of workers, the fewest first, to compare their speeds.

    Attributes:
        names: of the settings; each "" if all are the same.
        others: the other swept keys, which have one value here.
        enough: the number of workers above which the total speed does not grow; None: the most are the fastest.
    """

    rows: list[Row]
    names: list[str]
    others: dict[str, str]
    enough: int | None

    @property
    def microbatches(self) -> list[int]:
        """Microbatch sizes, the largest first; several: the steps are unequal."""
        return sorted({row.microbatch for row in self.rows}, reverse=True)


def series_of(made: Sequence[ForecastAnswer], tolerance: float) -> list[Series]:
    """Return a comparison for each device and microbatch, or for each batch size where microbatches differ.

    Args:
        tolerance: `report.speed_tolerance`: the share by which a total speed has to be higher.
    """
    able = [one for one in made if WORKERS in one.where and one.best is not None and samples_per_s(one.best)]
    equal, of_one_batch = _grouped(able, microbatch=True), _grouped(able, microbatch=False)
    return [_series(some, tolerance) for some in equal or of_one_batch]


def _grouped(able: Sequence[ForecastAnswer], microbatch: bool) -> list[list[ForecastAnswer]]:
    """Return groups with several numbers of workers and everything else equal."""
    groups: dict[tuple[object, ...], list[ForecastAnswer]] = {}
    for one in able:
        left = {WORKERS, BATCH} if microbatch else {WORKERS}
        alike = [(key, value) for key, value in one.where.items() if key not in left]
        groups.setdefault((*alike, one.best.microbatch if microbatch and one.best else 0), []).append(one)
    return [some for some in groups.values() if len(some) > 1]


def _series(some: Sequence[ForecastAnswer], tolerance: float) -> Series:
    ordered = sorted(some, key=lambda one: one.least.forecast.num_workers)
    rows = [one.best for one in ordered if one.best is not None]
    names = [one.recommendation.setting.name for one in ordered if one.recommendation.setting]
    paying = rows[0]
    for row in rows[1:]:
        paying = row if samples_per_s(row) > samples_per_s(paying) * (1 + tolerance) else paying
    unequal = len({row.microbatch for row in rows}) > 1  # of one batch size, which is then named
    left = {WORKERS} if unequal else {WORKERS, BATCH}
    others = {key: value for key, value in ordered[0].where.items() if key not in left}
    enough = paying.forecast.num_workers if paying is not rows[-1] else None
    return Series(rows, names if len(set(names)) > 1 else [""] * len(rows), others, enough)
