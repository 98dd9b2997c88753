"""The answers of forecasts, by the rules of a sweep's report and in its words. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from fsdp_lab.config import may_change_speed
from fsdp_lab.forecast.capacity import Forecast
from fsdp_lab.forecast.keep import predicted
from fsdp_lab.forecast.network import network_sentences
from fsdp_lab.forecast.table import Row
from fsdp_lab.metrics import MEMORY, PREDICTED_SPEED, RATIO_ERROR, RATIO_GROUP
from fsdp_lab.record.trial import words
from fsdp_lab.report.answer import as_lines, with_a_line
from fsdp_lab.report.qualify import LEAST
from fsdp_lab.report.recommend import Comparison, Recommendation, recommend
from fsdp_lab.report.render import environment
from fsdp_lab.report.settings import Rules, Setting
from fsdp_lab.speed.fitted import COMPARED
from fsdp_lab.speed.predict import Speed
from fsdp_lab.status import TrialStatus

if TYPE_CHECKING:
    import pandas as pd

WORKERS = "cluster.num_workers"
CONDITIONS = (WORKERS, "forecast.device", "training.global_batch_size")  # each value has its own answer
_MOST_ANSWERS = 3  # of more, only the recommended setting of each is described


@dataclass(frozen=True)
class Answer:
    """The answer for one device, number of workers and global batch size.

    Attributes:
        where: the swept values of these.
        rows: of the settings, by the numbers of their trials in the recommendation.
        recommendation: by the rules of a sweep.
        remedies: overrides that leave more room on a GPU, to try first if one is nearly full.
    """

    where: dict[str, str]
    rows: list[Row]
    recommendation: Recommendation
    remedies: Sequence[str] = ()

    def row(self, setting: Setting) -> Row:
        """Return the forecast of a setting."""
        return self.rows[setting.trials[0]]

    @cached_property
    def best(self) -> Row | None:
        """The recommended one; None: nothing fits."""
        setting = self.recommendation.setting
        return self.row(setting) if setting else None

    @property
    def lines(self) -> list[Comparison]:
        """The other settings that are compared with it in a line each."""
        return with_a_line(self.recommendation)

    @property
    def least(self) -> Row:
        """The setting that needs the least memory."""
        return min(self.rows, key=lambda row: row.forecast.needed_bytes)

    @property
    def roomy(self) -> Setting | None:
        """The fastest other setting that leaves room on its GPU; None without one."""
        return self._fastest(lambda forecast: not forecast.nearly_full)

    @property
    def sure(self) -> Setting | None:
        """The fastest other setting that fits for certain; None without one."""
        return self._fastest(lambda forecast: bool(forecast.fits))

    def _fastest(self, wanted: Callable[[Forecast], bool]) -> Setting | None:
        r = self.recommendation
        able = [s for s in r.able if s is not r.setting and wanted(self.row(s).forecast)]
        return max(able, key=lambda s: _samples_per_s(self.row(s)), default=None)


def answers(rows: Sequence[Row], swept: Sequence[str], tolerance: float, remedies: Sequence[str] = ()) -> list[Answer]:
    """Return the answer for each device, number of workers and global batch size.

    Args:
        rows: the forecasts; those with an error are left out.
        swept: the keys that differ.
        tolerance: `report.speed_tolerance`: what the fastest may be given up for if it nearly fills its GPU.
        remedies: overrides that leave more room on a GPU.
    """
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if not row.forecast.error:
            values = dict(zip(swept, row.settings, strict=True))
            groups.setdefault(tuple(values[key] for key in CONDITIONS if key in swept), []).append(row)
    axes = [key for key in swept if key not in CONDITIONS and may_change_speed(key)]
    rules = Rules(axes, speed_tolerance=tolerance, predicted=True)
    made = []
    for where, some in groups.items():
        named = dict(zip([key for key in CONDITIONS if key in swept], where, strict=True))
        made.append(Answer(named if len(groups) > 1 else {}, some, recommend(_frame(some, swept), rules), remedies))
    return made


def recommended(rows: Sequence[Row], swept: Sequence[str], tolerance: float) -> list[Row]:
    """Return the recommended setting of each device, number of workers and global batch size."""
    return [answer.best for answer in answers(rows, swept, tolerance) if answer.best is not None]


def _frame(rows: Sequence[Row], swept: Sequence[str]) -> pd.DataFrame:
    """Return forecasts as a sweep's frame; what may fit counts as fitting."""
    import pandas as pd

    return pd.DataFrame([_cells(row, swept) for row in rows])


def _cells(row: Row, swept: Sequence[str]) -> dict[str, object]:
    forecast = row.forecast
    known = forecast.capacity_bytes if not forecast.may_fit else None
    cells: dict[str, object] = {
        **dict(zip(swept, row.settings, strict=True)),
        "status": TrialStatus.finished,
        "timing_excluded": None,
        "device": "cuda" if forecast.cuda else "cpu",
        MEMORY: float(forecast.needed_bytes),
        "forecast/needed_bytes": float(forecast.needed_bytes),
        LEAST: float(forecast.least_bytes) if forecast.tight else math.nan,
        "forecast/capacity_bytes": float(known) if known is not None else math.nan,
        RATIO_GROUP: "",
    }
    if forecast.speed is not None:
        one = predicted(forecast.speed)
        cells |= {PREDICTED_SPEED: one.speed, f"{PREDICTED_SPEED}_low": one.low, f"{PREDICTED_SPEED}_high": one.high}
        cells |= {RATIO_ERROR: math.nan if one.relative is None else one.relative, RATIO_GROUP: one.group}
    return cells


def sentences(rows: Sequence[Row], swept: Sequence[str], items: str, made: Sequence[Answer], tolerance: float) -> str:
    """Return what fits, the answers, and what more workers bring, a line each.

    Args:
        rows: the forecasts.
        swept: the keys that differ.
        items: the noun for the samples of a batch.
        made: the answers.
        tolerance: `report.speed_tolerance`.
    """
    having = [row for row in rows if not row.forecast.error]
    text = environment(False).get_template("forecast.txt.j2").render(
        rows=rows,
        having=having,
        items=items,
        kind="GPU" if having[0].forecast.cuda else "worker",
        answers=made,
        brief=len(made) > _MOST_ANSWERS,
        fewest=_fewest(having, swept),
        scaling=_scaling(made),
        network=network_sentences(rows, swept, tolerance),
        compared=COMPARED,
    )  # fmt: skip
    return as_lines(text)


def _fewest(rows: Sequence[Row], swept: Sequence[str]) -> list[tuple[str, int | None]]:
    """Return each setting with the fewest workers that hold it; empty if one number was forecast, or no capacity."""
    if WORKERS not in swept or all(row.forecast.capacity_bytes is None for row in rows):
        return []
    fewest: dict[str, int | None] = {}
    for row in sorted(rows, key=lambda row: row.forecast.num_workers):
        name = words({key: value for key, value in zip(swept, row.settings, strict=True) if key != WORKERS})
        if row.forecast.fits and fewest.get(name) is None:
            fewest[name] = row.forecast.num_workers
        fewest.setdefault(name, None)
    return list(fewest.items())


def _scaling(made: Sequence[Answer]) -> list[dict[str, object]]:
    """Return what the largest number of workers brings against the smallest, for each device and batch size."""
    alike: dict[tuple[tuple[str, str], ...], list[Answer]] = {}
    for answer in made:
        if answer.best and answer.best.forecast.speed and WORKERS in answer.where:
            others = tuple((key, value) for key, value in answer.where.items() if key != WORKERS)
            alike.setdefault(others, []).append(answer)
    gains: list[dict[str, object]] = []
    for others, some in alike.items():
        few, many = (find(some, key=lambda a: a.best.forecast.num_workers if a.best else 0) for find in (min, max))
        best, other = many.recommendation.setting, few.recommendation.setting
        if few is many or best is None or other is None:
            continue
        same = next((s for s in few.recommendation.able if s.values == best.values), other)
        before, after = few.row(same), many.row(best)
        gains.append(
            {"others": dict(others), "few": before, "many": after, "best": best, "same": same}
            | {"times": _samples_per_s(after) / _samples_per_s(before) if before.forecast.speed else math.nan}
        )
    return gains


def _samples_per_s(row: Row) -> float:
    speed: Speed | None = row.forecast.speed
    return speed.samples_per_s if speed else 0.0
