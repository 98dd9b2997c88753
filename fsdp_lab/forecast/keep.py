"""`forecast.keep`: which settings of a sweep are promising enough to be measured. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping

from fsdp_lab.forecast.fits import Forecast
from fsdp_lab.speed.predict import Speed


def passed_over(forecasts: Mapping[int, Forecast], settings: Mapping[int, str], keep: str) -> dict[int, str]:
    """Return the trials that need not run, and why: those that cannot fit, and those that cannot be among the fastest.

    The fastest settings by their predictions are kept, as many as asked for, and so is every other that by the errors
    of such predictions may be as fast as the last of them. What has no prediction is kept.

    Args:
        forecasts: by the number of a trial.
        settings: what tells settings apart; repeats share it.
        keep: a number of settings, as `5`, or a share of those that fit, as `20%`.
    """
    reasons = {number: _does_not_fit(found) for number, found in forecasts.items() if found.fits is False}
    speeds = {n: found.speed for n, found in forecasts.items() if found.speed is not None and n not in reasons}
    ranked = sorted({settings[n]: speed for n, speed in speeds.items()}.values(), key=_seconds)
    kept = ranked[: number_kept(keep, len(ranked))]
    if not kept:
        return reasons
    slowest = kept[-1].high_s / kept[-1].samples
    for number, speed in speeds.items():
        if _seconds(speed) > _seconds(kept[-1]) and speed.low_s / speed.samples > slowest:
            low, high = (speed.samples / seconds for seconds in (speed.high_s, speed.low_s))
            reasons[number] = (
                f"predicted {speed.samples_per_s:,.4g} samples/s ({low:,.4g} to {high:,.4g}), which is not among the "
                f"most promising; forecast.keep={keep} does not start it"
            )
    return reasons


def number_kept(keep: str, settings: int) -> int:
    """Return how many of so many settings `forecast.keep` stands for; at least one."""
    if keep.endswith("%"):
        return max(1, math.ceil(float(keep[:-1]) / 100 * settings))
    return int(keep)


def _seconds(speed: Speed) -> float:
    return speed.step_s / speed.samples


def _does_not_fit(found: Forecast) -> str:
    assert found.capacity_bytes is not None
    return (
        f"needs {found.needed_bytes / 2**20:,.0f} MiB of {found.capacity_bytes / 2**20:,.0f} MiB a device by the "
        "forecast; forecast.keep does not start it"
    )
