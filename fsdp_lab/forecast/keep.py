"""`forecast.keep`: which settings of a sweep are promising enough to be measured. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from fsdp_lab.forecast.fits import Forecast
from fsdp_lab.speed.predict import Speed


@dataclass(frozen=True)
class Predicted:
    """Samples/s: as predicted, and between which nine of ten such predictions lie."""

    speed: float
    low: float
    high: float

    @staticmethod
    def of(speed: Speed) -> Predicted:
        return Predicted(speed.samples_per_s, speed.samples / speed.high_s, speed.samples / speed.low_s)


def passed_over(
    forecasts: Mapping[int, Forecast],
    settings: Mapping[int, str],
    keep: str,
    before: Mapping[int, Predicted] | None = None,
) -> dict[int, str]:
    """Return the trials that need not run, and why: those that cannot fit, and those that cannot be among the fastest.

    The fastest settings by their predictions are kept, as many as asked for, and so is every other that by the errors
    of such predictions may be as fast as the last of them. What has no prediction is kept. What is tight takes nobody's
    place: where something fits, it is kept beside that, if it may be as fast.

    Args:
        forecasts: by the number of a trial.
        settings: what tells settings apart; repeats share it.
        keep: a number of settings, as `5`, or a share of those that fit, as `20%`.
        before: the predictions of trials that have ended, which count among the fastest.
    """
    not_started = f"forecast.keep={keep} does not start it"
    no_room = {n: found for n, found in forecasts.items() if found.fits is False}
    reasons = {n: f"{found.shortage}; {not_started}" for n, found in no_room.items() if not found.tight}
    known = {n: Predicted.of(f.speed) for n, f in forecasts.items() if f.speed is not None and n not in reasons}
    fitting = {**(before or {}), **{n: p for n, p in known.items() if n not in no_room}} or known
    ranked = sorted({settings[n]: p for n, p in fitting.items()}.values(), key=lambda p: -p.speed)
    kept = ranked[: number_kept(keep, len(ranked))]
    if not kept:
        return reasons
    last = kept[-1]
    for number, one in known.items():
        if one.speed < last.speed and one.high < last.low:
            reasons[number] = (
                f"predicted {one.speed:,.4g} samples/s ({one.low:,.4g} to {one.high:,.4g}), which is not among the "
                f"most promising; {not_started}"
            )
    return reasons


def number_kept(keep: str, settings: int) -> int:
    """Return how many of so many settings `forecast.keep` stands for; at least one."""
    if keep.endswith("%"):
        return max(1, math.ceil(Fraction(keep[:-1]) / 100 * settings))
    return int(keep)
