"""`forecast.keep`: selects the settings of a sweep that are promising enough to be measured. Imports no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from fractions import Fraction
from hashlib import sha256

from fsdp_lab.config import TrialConfig, flatten, memory_settings
from fsdp_lab.forecast.capacity import Forecast
from fsdp_lab.record.reasons import Code, Reason
from fsdp_lab.report.predicted import Predicted
from fsdp_lab.speed.device import Device, DeviceKind
from fsdp_lab.speed.fitted import digest
from fsdp_lab.speed.predict import Speed
from fsdp_lab.wording import count


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


class Place(StrEnum):
    """The decision of `forecast.keep` about a trial."""

    kept = "kept"
    slower = "slower"
    no_room = "no room"


class Selection:
    """The trials that `forecast.keep` measures, of one number of workers.

    It keeps:

    - the requested number of settings with the fastest predictions
    - others that may be as fast as the last of them, by the errors of predictions
    - the fastest of each global batch size, because samples may teach differently between these
    - the setting that a forecast recommends, which may be slower but smaller
    - settings without a prediction

    A setting that is tight, or that may fit, does not count towards the number if another fits; it is kept in addition
    if it may be as fast.

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
        fitting = {n: o for n, o in self.known.items() if forecasts[n].fits is not False and not forecasts[n].may_fit}
        # one of each setting, the fastest first; where nothing fits, of what is tight or may fit
        ranked = {settings[n]: one for n, one in (fitting or self.known).items()}.values()
        self.ranked = sorted(ranked, key=lambda one: -one.speed)
        self.wanted = number_kept(keep, len(self.ranked))
        self.last = self.ranked[: self.wanted][-1] if self.ranked else None
        self._recommended = {n for n in forecasts if settings[n] in recommended}
        self._no_room = forecasts.keys() - able.keys()
        self._full = {n for n, forecast in able.items() if forecast.nearly_full}
        self._in_rank = (fitting or self.known).keys()
        self._of_batch = {one.samples: one.speed for one in reversed(self.ranked)}

    def place(self, number: int) -> Place:
        """Return the decision about a trial."""
        one, last = self.known.get(number), self.last
        if one is None or last is None:
            return Place.no_room if number in self._no_room else Place.kept
        of_batch = number in self._in_rank and one.speed >= self._of_batch[one.samples]
        kept = one.may_reach(last) or of_batch or number in self._recommended
        return Place.kept if kept else Place.slower

    def how_sure(self, numbers: Iterable[int]) -> str:
        """Return in words by which error these may be as fast as the last setting of the requested number."""
        numbers = list(numbers)
        some = [self.known[number] for number in numbers]
        ratios = [one.ratio_error(self.last) for one in some if self.last is not None]
        known = [ratio for ratio in ratios if ratio is not None]
        if len(known) == len(some):
            return f"the predicted ratio of two settings has an error of up to ±{max(known):.0%}"
        off = max(max(1 - one.low / one.speed for one in some), 0.0)
        full = ", more where a GPU is nearly full" if any(number in self._full for number in numbers) else ""
        return f"their ranges overlap (±{off:.0%} each{full})"


def passed_over(
    forecasts: Mapping[int, Forecast],
    settings: Mapping[int, str],
    keep: str,
    recommended: Collection[str] = (),
) -> dict[int, Reason]:
    """Return the trials that need not run, and why; the arguments are those of `Selection`."""
    selection = Selection(forecasts, settings, keep, recommended)
    put = {number: selection.place(number) for number in forecasts}
    why = {
        n: Reason.of(Code.does_not_fit, **forecasts[n].shortage, keep=keep)
        for n, place in put.items()
        if place is Place.no_room
    }
    if selection.last is not None:
        slower = [n for n, place in put.items() if place is Place.slower]
        why |= {n: _too_slow(selection.known[n], selection.last, keep) for n in slower}
    return why


def _too_slow(one: Predicted, last: Predicted, keep: str) -> Reason:
    share, sure = one.speed / last.speed, one.ratio_error(last)
    return Reason.of(Code.too_slow, speed=one.speed, low=one.low, high=one.high, share=share, error=sure, keep=keep)


def why_all(
    forecasts: Mapping[int, Forecast],
    settings: Mapping[int, str],
    keep: str,
    recommended: Collection[str] = (),
) -> str:
    """Return why `forecast.keep` skips nothing, where `passed_over` names no trial; the arguments are the same."""
    selection = Selection(forecasts, settings, keep, recommended)
    ranked, wanted = selection.ranked, selection.wanted
    if not ranked:
        return "nothing is skipped: no setting has a predicted speed"
    if len(ranked) <= wanted:
        have = f"{count(len(ranked), 'setting')} {'has' if len(ranked) == 1 else 'have'}"
        return f"nothing is skipped: {have} a predicted speed, and forecast.keep asks for {wanted}"
    sure = selection.how_sure(selection.known)
    place = "the fastest" if wanted == 1 else f"one of the {wanted} fastest"
    return f"nothing is skipped: each of the {len(ranked)} settings may be {place}, because {sure}"


def number_kept(keep: str, settings: int) -> int:
    """Return how many settings `forecast.keep` stands for; at least one.

    Args:
        keep: a number, or a share such as `20%`.
        settings: how many there are.
    """
    if keep.endswith("%"):
        return max(1, math.ceil(Fraction(keep[:-1]) / 100 * settings))
    return int(keep)
