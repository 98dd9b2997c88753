"""What the command prints of forecasts: what fits, the answers, and what more workers bring. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from fsdp_lab.forecast.answer import WORKERS, ForecastAnswer
from fsdp_lab.forecast.capacity import Forecast
from fsdp_lab.forecast.scaling import series_of
from fsdp_lab.forecast.table import Row
from fsdp_lab.forecast.words import say
from fsdp_lab.record.trial import words
from fsdp_lab.report.answer import plain_text

_UNSURE = 1e12  # for numbers of workers: above all, and below none
_MOST_ANSWERS = 3  # of more, only the recommended setting of each is described
_PLAIN = ("fp32", "float32", "false")  # of precisions


def sentences(
    rows: Sequence[Row], swept: Sequence[str], items: str, made: Sequence[ForecastAnswer], tolerance: float
) -> list[str]:
    """Return what fits, what more workers bring, and the answers, a line each.

    Args:
        items: the noun for the samples of a batch.
        tolerance: `report.speed_tolerance`.
    """
    having = [row for row in rows if not row.forecast.error]
    lines = [*say("fits", rows, having, items), *say("series", series_of(made, tolerance))]
    lines += say("fewest", _fewest(having, swept), having)
    for answer in made:
        new = [note for note in answer.notes if note not in lines]
        shown = replace(answer, notes=new, lines=answer.lines if len(made) <= _MOST_ANSWERS else [])
        lines += plain_text(shown, "forecast.csv")
    speeds = [row.forecast.speed for row in rows if row.forecast.speed is not None and row.forecast.speed.network]
    lines += dict.fromkeys([*say("reached", speeds), *say("assumed", speeds)])
    lines += say("losses", _precisions(made, swept))
    lines += say("more_workers", having) if WORKERS not in swept else []
    return [line.replace("`", "") for line in lines]


def _precisions(made: Sequence[ForecastAnswer], swept: Sequence[str]) -> list[str]:
    """Return the recommended values of precision, other than float32, where precision is varied."""
    values = [dict(zip(swept, one.best.settings, strict=True)) for one in made if one.best is not None]
    of = [{key: value for key, value in each.items() if key.partition(".")[0] == "precision"} for each in values]
    return list(dict.fromkeys(words(each) for each in of if any(value not in _PLAIN for value in each.values())))


def _fewest(rows: Sequence[Row], swept: Sequence[str]) -> dict[str, list[str]]:
    """Return the settings by the fewest workers that hold them; empty if one number was forecast, or no capacity."""
    if WORKERS not in swept or all(row.forecast.capacity_bytes is None for row in rows):
        return {}
    by_setting: dict[str, list[Forecast]] = {}
    for row in rows:
        name = words({key: value for key, value in zip(swept, row.settings, strict=True) if key != WORKERS})
        by_setting.setdefault(name, []).append(row.forecast)
    fewest: dict[float, list[str]] = {}
    for name, forecasts in by_setting.items():
        holding = [forecast.num_workers for forecast in forecasts if forecast.fits]
        unsure = any(forecast.tight for forecast in forecasts)
        fewest.setdefault(min(holding, default=_UNSURE if unsure else math.inf), []).append(name)
    texts = {_UNSURE: "tight, or not known", math.inf: "none of these"}
    return {texts.get(number, f"{number:.0f}"): names for number, names in sorted(fewest.items())}
