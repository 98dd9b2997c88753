"""`forecast.keep`: which settings of a sweep are promising enough to be measured. Imports no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from hashlib import sha256

from fsdp_lab.config import TrialConfig, flatten, memory_settings
from fsdp_lab.forecast.fits import Forecast
from fsdp_lab.speed.device import Device, DeviceKind
from fsdp_lab.speed.fitted import digest
from fsdp_lab.speed.predict import Speed
from fsdp_lab.wording import count


@dataclass(frozen=True)
class Predicted:
    """Samples/s: as predicted, and between which nine of ten such predictions lie. `relative`: by how much the ratio of
    two of one group is off, for nine of ten; None: not known. `group`: see `ratio_group`; "": not known."""

    speed: float
    low: float
    high: float
    relative: float | None = None
    group: str = ""

    @staticmethod
    def of(speed: Speed) -> Predicted:
        low, high = speed.samples / speed.high_s, speed.samples / speed.low_s
        return Predicted(speed.samples_per_s, low, high, speed.relative, speed.group)

    def may_reach(self, other: Predicted) -> bool:
        """Whether it may be as fast: by the error of their ratio, or where that is not known by both ranges."""
        sure = self.ratio_error(other)
        return self.high >= other.low if sure is None else self.speed * (1 + sure) >= other.speed

    def ratio_error(self, other: Predicted) -> float | None:
        """Return by how much the ratio of the two may be off; None where that is not known: what is common to all
        predictions of a group need not be common to those of two."""
        if self.relative is None or other.relative is None or not self.group or self.group != other.group:
            return None
        return max(self.relative, other.relative)


def ratio_group(config: TrialConfig, num_workers: int, device: Device) -> str:
    """Return what tells groups of predictions apart: the error of a ratio is known for two with the same model, data,
    task, number of workers, compilation and offloading, by the same figures of a device."""
    known = memory_settings(config, num_workers).items()
    what = {name: value for name, value in known if name.partition(".")[0] in ("model", "data")}
    offload = config.offload.target.value if device.kind is DeviceKind.cuda else ""  # on a CPU it does nothing
    told = [what, flatten(config.task), num_workers, config.compile, offload, digest(device)]
    return sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


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
    ranked = _ranked(known, no_room, settings, before)
    if not ranked:
        return reasons
    last = ranked[: number_kept(keep, len(ranked))][-1]
    for number, one in known.items():
        if one.speed < last.speed and not one.may_reach(last):
            reasons[number] = f"{_too_slow(one, last)}; {not_started}"
    return reasons


def _ranked(
    known: Mapping[int, Predicted],
    no_room: Mapping[int, Forecast],
    settings: Mapping[int, str],
    before: Mapping[int, Predicted] | None,
) -> list[Predicted]:
    """One prediction of each setting that fits, the fastest first; where nothing fits, of each that is tight."""
    fitting = {**(before or {}), **{n: p for n, p in known.items() if n not in no_room}} or known
    return sorted({settings[n]: p for n, p in fitting.items()}.values(), key=lambda p: -p.speed)


def _too_slow(one: Predicted, last: Predicted) -> str:
    sure = one.ratio_error(last)
    if sure is None:
        return (
            f"predicted {one.speed:,.4g} samples/s ({one.low:,.4g} to {one.high:,.4g}), which is not among the most "
            "promising"
        )
    return (
        f"predicted {one.speed:,.4g} samples/s, {1 - one.speed / last.speed:.0%} below the last of the most promising, "
        f"and the ratio of two predictions is known to ±{sure:.0%}"
    )


def why_all(
    forecasts: Mapping[int, Forecast],
    settings: Mapping[int, str],
    keep: str,
    before: Mapping[int, Predicted] | None = None,
) -> str:
    """Return why `forecast.keep` skips nothing, where `passed_over` names no trial; the arguments are the same."""
    known = {n: Predicted.of(f.speed) for n, f in forecasts.items() if f.speed is not None}
    ranked = _ranked(known, {n: f for n, f in forecasts.items() if f.fits is False}, settings, before)
    wanted = number_kept(keep, len(ranked))
    if not ranked:
        return "nothing is skipped: no setting has a predicted speed"
    if len(ranked) <= wanted:
        return f"nothing is skipped: {count(len(ranked), 'setting')} with a predicted speed, and {wanted} are wanted"
    ratios = [one.ratio_error(ranked[wanted - 1]) for one in known.values()]
    told = [ratio for ratio in ratios if ratio is not None]
    if len(told) == len(ratios):
        sure = f"their ratios are known to ±{max(told):.0%}"
    else:
        most = max(f.speed.error for f in forecasts.values() if f.speed is not None)
        sure = f"predictions are known to ±{most:.0%}"
    return f"nothing is skipped: each of the {len(ranked)} settings may be one of the {wanted} fastest, for {sure}"


def number_kept(keep: str, settings: int) -> int:
    """Return how many of so many settings `forecast.keep` stands for; at least one."""
    if keep.endswith("%"):
        return max(1, math.ceil(Fraction(keep[:-1]) / 100 * settings))
    return int(keep)
