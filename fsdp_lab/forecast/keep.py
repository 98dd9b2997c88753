"""`forecast.keep`: selects the settings of a sweep that are promising enough to be measured. Imports no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from fractions import Fraction
from hashlib import sha256

from fsdp_lab.config import TrialConfig, flatten, memory_settings
from fsdp_lab.forecast.capacity import Forecast
from fsdp_lab.forecast.speed.device import Device, DeviceKind, digest
from fsdp_lab.forecast.speed.predict import Speed
from fsdp_lab.forecast.words import say
from fsdp_lab.record.reasons import Code, Reason
from fsdp_lab.report.predicted import Predicted


def predicted(speed: Speed) -> Predicted:
    """Return a predicted speed in samples/s."""
    low, high = speed.samples / speed.high_s, speed.samples / speed.low_s
    return Predicted(speed.samples_per_s, low, high, speed.relative, speed.group, speed.samples)


def ratio_group(config: TrialConfig, num_workers: int, device: Device) -> str:
    """Return an identifier of the group in which the error of ratios is known.

    Its predictions have the same model, data, task, number of workers, compilation and offloading, and figures of a
    device.
    """
    known = memory_settings(config, num_workers).items()
    what = {name: value for name, value in known if name.partition(".")[0] in ("model", "data")}
    offload = config.offload.target.value if device.kind is DeviceKind.cuda else ""  # on a CPU it does nothing
    parts = [what, flatten(config.task), num_workers, config.compile, offload, digest(device)]
    return sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


class Selection:
    """The trials that `forecast.keep` measures, of one number of workers.

    It keeps:

    - the requested number of settings with the fastest predictions
    - others that may be as fast as the last of them, by the errors of predictions
    - the fastest of each global batch size, because samples may teach differently between these
    - the setting that a forecast recommends, which may be slower but smaller
    - settings without a prediction

    A setting that is tight does not count towards the number if another fits; it is kept in addition if it may be as
    fast.

    Args:
        forecasts: by the number of a trial.
        settings: an identifier of the setting of each trial; repeats share it.
        keep: a number of settings, such as `5`, or a share of those that fit, such as `20%`.
        recommended: the identifiers that a forecast recommends.
    """

    def __init__(
        self,
        forecasts: Mapping[int, Forecast],
        settings: Mapping[int, str],
        keep: str,
        recommended: Collection[str] = (),
    ) -> None:
        able = {n: f for n, f in forecasts.items() if f.fits is not False or f.tight}
        self.known = {n: predicted(f.speed) for n, f in able.items() if f.speed is not None}
        fitting = {n: o for n, o in self.known.items() if forecasts[n].fits is not False}
        # one of each setting, the fastest first; where nothing fits, of what is tight
        ranked = {settings[n]: one for n, one in (fitting or self.known).items()}.values()
        self.ranked = sorted(ranked, key=lambda one: -one.speed)
        self.wanted = number_kept(keep, len(self.ranked))
        self.last = self.ranked[: self.wanted][-1] if self.ranked else None
        self._recommended = {n for n in forecasts if settings[n] in recommended}
        self._no_room = {n: forecasts[n].shortage for n in forecasts.keys() - able.keys()}
        self._keep = keep
        self._in_rank = (fitting or self.known).keys()
        self._of_batch = {one.samples: one.speed for one in reversed(self.ranked)}

    def why_not(self, number: int) -> Reason | None:
        """Return why a trial need not run; None: it is measured."""
        one, last = self.known.get(number), self.last
        if number in self._no_room:
            return Reason.of(Code.does_not_fit, **self._no_room[number], keep=self._keep)
        if one is None or last is None or one.may_reach(last) or number in self._recommended:
            return None
        if number in self._in_rank and one.speed >= self._of_batch[one.samples]:
            return None
        share, sure = one.speed / last.speed, one.ratio_error(last)
        return Reason.of(
            Code.too_slow, speed=one.speed, low=one.low, high=one.high, share=share, error=sure, keep=self._keep
        )


def passed_over(
    forecasts: Mapping[int, Forecast],
    settings: Mapping[int, str],
    keep: str,
    recommended: Collection[str] = (),
) -> dict[int, Reason]:
    """Return the trials that need not run, and why; the arguments are those of `Selection`."""
    selection = Selection(forecasts, settings, keep, recommended)
    return {number: why for number in forecasts if (why := selection.why_not(number)) is not None}


def why_all(
    forecasts: Mapping[int, Forecast],
    settings: Mapping[int, str],
    keep: str,
    recommended: Collection[str] = (),
) -> str:
    """Return why `forecast.keep` skips nothing, where `passed_over` names no trial; the arguments are the same."""
    selection = Selection(forecasts, settings, keep, recommended)
    return " ".join(say("keeps_all", len(selection.ranked), selection.wanted))


def number_kept(keep: str, settings: int) -> int:
    """Return how many settings `forecast.keep` stands for; at least one.

    Args:
        keep: a number, or a share such as `20%`.
    """
    if keep.endswith("%"):
        return max(1, math.ceil(Fraction(keep[:-1]) / 100 * settings))
    return int(keep)
