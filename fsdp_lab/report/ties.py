"""Settings that are equally good, and which of them is taken. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from fsdp_lab.metrics import SPEED
from fsdp_lab.report.choice import departures, smallest
from fsdp_lab.report.predicted import EQUAL
from fsdp_lab.report.settings import Setting, Settings, or_inf
from fsdp_lab.report.statements import TieBreak

SCARCE = 0.9  # of a device's memory: a setting that needs more makes memory scarce, as in forecasts


def best_of(settings: Settings, able: Sequence[Setting]) -> tuple[list[Setting], list[Setting]]:
    """Return the settings that are equally good, and those that were compared by their speeds.

    Predictions have no noise of runs: of these only equal ones tie, unless the fastest makes memory scarce.
    """
    rules, speeds, left, raced = settings.rules, settings.speeds, list(able), []
    for metric, direction in rules.objectives or [(SPEED, "max")]:
        if metric == SPEED and direction == "max":
            raced = [s for s in left if speeds.has(s.group)]
            speed = {s.name: speeds.estimate(s.group) for s in raced}
            fastest = max(raced, key=lambda s: speed[s.name], default=None)
            roomy = rules.predicted and fastest is not None and not is_memory_scarce(settings, [fastest])
            tolerance = EQUAL if roomy else rules.speed_tolerance
            limit = speed[fastest.name] * (1 - tolerance) if fastest else 0.0
            left = [s for s in raced if speed[s.name] >= limit * (1 - 1e-9)] or left
            continue
        last = metric == rules.objectives[-1][0]
        values = {s.name: settings.value(s, metric) * (1 if direction == "min" else -1) for s in left}
        best = min(left, key=lambda s: or_inf(values[s.name]))
        limit = values[best.name] + (0.0 if last else abs(values[best.name]) * rules.loss_tolerance)
        left = [s for s in left if values[s.name] <= limit + settings.rounding(s, best, metric)] or left
    return left, raced


def is_memory_scarce(settings: Settings, tied: Sequence[Setting]) -> bool:
    """Return whether one of these settings nearly fills its device, by its forecast."""
    needs = ((settings.median(s, "forecast/needed_bytes"), settings.median(s, "forecast/capacity_bytes")) for s in tied)
    return any(needed > SCARCE * capacity for needed, capacity in needs)


def break_tie(settings: Settings, tied: Sequence[Setting], raced: bool) -> tuple[Setting, TieBreak | None]:
    """Return one of settings that are equally good, and what decided."""
    left, decided = list(tied), TieBreak.speed if raced and len(tied) == 1 else TieBreak.order
    if not raced or settings.rules.predicted or is_memory_scarce(settings, tied):
        left = [tied[place] for place in smallest([settings.peaks[s.group] for s in tied])]
        decided = TieBreak.memory if len(left) < len(tied) else decided
    rules: tuple[tuple[TieBreak, Callable[[Setting, Sequence[Setting]], Any]], ...] = (
        (TieBreak.simplicity, lambda s, _: departures(s.values)),
        (TieBreak.loss, lambda s, others: _loss_above(settings, s, others)),
        (TieBreak.speed, lambda s, _: -settings.speeds.estimate(s.group) if settings.speeds.has(s.group) else 0.0),
    )
    for rule, key in rules:
        best = min(key(s, left) for s in left)
        kept = [s for s in left if key(s, left) == best]
        decided = rule if len(kept) < len(left) else decided
        left = kept
    return left[0], decided


def _loss_above(settings: Settings, setting: Setting, others: Sequence[Setting]) -> float:
    """Return by how much a loss exceeds the lowest one, beyond their rounding; 0: it does not."""
    loss = settings.loss_key
    lowest = min(others, key=lambda s: or_inf(settings.median(s, loss)))
    above = or_inf(settings.median(setting, loss)) - settings.median(lowest, loss)
    return max(above - settings.rounding(setting, lowest, loss), 0.0) if math.isfinite(above) else 0.0


def is_tied(settings: Settings, one: Setting, other: Setting) -> bool:
    """Return whether two settings are equal in speed, within the tolerance, the noise or the error of predictions."""
    ratio = settings.speeds.ratio(one.group, other.group)
    limit = 1 / (1 - (EQUAL if settings.rules.predicted else settings.rules.speed_tolerance))
    return ratio.value == 1 or 1 / limit <= ratio.value <= limit or (ratio.known and ratio.low <= 1 <= ratio.high)
