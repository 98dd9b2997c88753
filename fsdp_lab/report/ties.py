"""Settings that are equally good, and which of them is taken. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from fsdp_lab.config.metrics import SPEED
from fsdp_lab.report.choice import departures, smallest
from fsdp_lab.report.settings import Setting, Settings
from fsdp_lab.report.speed import EQUAL

SCARCE = 0.9  # of a device's memory: a setting that needs more makes memory scarce, as in forecasts


def best_of(settings: Settings, able: Sequence[Setting]) -> tuple[list[Setting], list[Setting]]:
    """Return the settings that are equally good, and those that were compared by their speeds.

    Predictions have no noise of runs: of these only equal ones tie, unless the fastest makes memory scarce.
    """
    rules, left, raced = settings.rules, list(able), list[Setting]()
    for metric, direction in rules.objectives or [(SPEED, "max")]:
        known = [s for s in left if metric in s.figures]
        if not known:
            continue
        sign = 1 if direction == "min" else -1
        best = min(known, key=lambda s: sign * s.figure(metric))
        if (metric, direction) == (SPEED, "max"):
            raced = known
            roomy = rules.predicted and not is_memory_scarce([best])
            tolerance = EQUAL if roomy else rules.speed_tolerance
        else:
            tolerance = 0.0 if metric == rules.objectives[-1][0] else rules.loss_tolerance
        limit = sign * best.figure(metric) + (tolerance + 1e-9) * abs(best.figure(metric))
        left = [s for s in known if sign * s.figure(metric) <= limit + s.rounding(best, metric)]
    return left, raced


def is_memory_scarce(tied: Sequence[Setting]) -> bool:
    """Return whether one of these settings nearly fills its device, by its forecast."""
    return any(s.figure("forecast/needed_bytes") > SCARCE * s.figure("forecast/capacity_bytes") for s in tied)


def break_tie(settings: Settings, tied: Sequence[Setting], raced: bool) -> tuple[Setting, str]:
    left = list(tied)
    decided: str = "speed" if raced and len(tied) == 1 else "order"
    if not raced or settings.rules.predicted or is_memory_scarce(tied):
        left = [tied[place] for place in smallest([s.peak for s in tied])]
        decided = "memory" if len(left) < len(tied) else decided
    rules: tuple[tuple[str, Callable[[Setting], Any]], ...] = (
        ("simplicity", lambda s: departures(s.values)),
        ("loss", lambda s: _loss_above(s, left, settings.loss_key)),
        ("speed", lambda s: -s.figure(SPEED, 0.0)),
    )
    for rule, key in rules:
        keys = [key(s) for s in left]
        kept = [s for s, own in zip(left, keys, strict=True) if own == min(keys)]
        decided = rule if len(kept) < len(left) else decided
        left = kept
    return left[0], decided


def _loss_above(setting: Setting, others: Sequence[Setting], loss: str) -> float:
    """Return by how much a loss exceeds the lowest one, beyond their rounding; 0: it does not."""
    lowest = min(others, key=lambda s: s.figure(loss, math.inf))
    if loss not in lowest.figures:
        return 0.0
    return max(setting.figure(loss, math.inf) - lowest.figure(loss) - setting.rounding(lowest, loss), 0.0)


def is_tied(settings: Settings, one: Setting, other: Setting) -> bool:
    """Return whether two settings are equal in speed, within the tolerance, the noise or the error of predictions."""
    ratio = one.times(other)
    limit = 1 / (1 - (EQUAL if settings.rules.predicted else settings.rules.speed_tolerance))
    return ratio.value == 1 or 1 / limit <= ratio.value <= limit or (ratio.known and ratio.low <= 1 <= ratio.high)
