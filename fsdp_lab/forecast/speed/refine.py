"""Finished trials correct the predictions for their device: compute, communication and overlap."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import ceil, exp, log
from statistics import median

from fsdp_lab.forecast.speed.device import Basis, Device, Errors, Factors, KnownError
from fsdp_lab.forecast.speed.predict import LAUNCHES, Parts, is_near

_NOISE = 0.05  # the least noise of a trial, as a relative error
_AGREE = 0.1  # corrected ratios that differ by less agree
_CONVINCE = 3  # with this many agreeing settings, another group corrects in full; with fewer, in proportion
_APART = 0.5  # prior width: between the two factors, and of the overlap from 1
_COMPUTE = 0.95  # a trial corrects other groups if compute bounds this share of its step
_PAIRS = 20  # the fewest for a 90th percentile


@dataclass(frozen=True)
class Observation:
    """The step of a finished trial.

    Attributes:
        setting: an identifier, equal for runs of one setting.
        parts: of the step as predicted, uncorrected.
        measured_s: its seconds, without waiting for data.
        device: the digest of the figures that it was predicted by.
        group: see `fsdp_lab.forecast.keep.ratio_group`.
        at: when it ended, in seconds since 1970.
        noise: the standard error of `measured_s`, as a share of it; at least 5 % is used.
    """

    setting: str
    parts: Parts
    measured_s: float
    torch: str
    device: str
    group: str
    at: float
    noise: float = _NOISE


def refine(device: Device, observations: Iterable[Observation], group: str) -> Device:
    """Return the device, corrected by finished trials for the steps of a group; unchanged without trials.

    The trials are those of the group. Without any, they are all others that compute bound, because delays by the host
    or the network need not apply to this group. One such setting corrects by a third (of the logarithm), two that agree
    by two thirds, and three in full. Until three agree, settings whose time differs from the prediction by a factor
    over 1.5 do not count.

    With one trial, both factors are its measured over its predicted time. Several trials separate compute from
    communication. The factors minimise the squares of the relative errors, each divided by the noise of its trial.

    From eight settings of the group on, leaving out one setting at a time gives the errors. They are at least half the
    error of ratios without trials.
    """
    some = list(observations)
    alike = [one for one in some if one.group == group]
    settings = _settings(alike or [one for one in some if _says_something_of_others(one)])
    if not alike and not (len(settings) >= _CONVINCE and _agree(settings)):
        settings = [one for one in settings if is_near(one.measured_s / one.parts.step_s())]
    if not settings:
        return device
    factors, agree = _fit(settings), _agree(settings)
    if not alike:
        factors = _shrunk(factors, min(len(settings) if agree else 1, _CONVINCE) / _CONVINCE)
    refined = replace(device, basis=Basis.trials, factors=replace(factors, alike=bool(alike), agree=agree))
    if not refined.factors.know_errors:
        return refined
    ratios = [
        one.parts.step_s(_fit([*settings[:place], *settings[place + 1 :]])) / one.measured_s
        for place, one in enumerate(settings)
    ]
    errors = sorted(abs(ratio - 1) for ratio in ratios)
    p90, least = errors[min(len(errors) - 1, int(0.9 * len(errors)))], (device.relative or device.errors.other).p90 / 2
    error = KnownError(_within(median(errors)), _within(max(p90, least)))
    pairs = pair_error([ratios])
    assert pairs is not None  # eight settings make 28
    relative = KnownError(pairs.median, _within(max(pairs.p90, least)))
    return replace(refined, errors=Errors(error), relative=relative)


def pair_error(groups: Iterable[Sequence[float]]) -> KnownError | None:
    """Return the relative error of the ratio of two predicted times; None for fewer than twenty pairs.

    An error common to all predictions cancels in it.

    Args:
        groups: for each model the ratios predicted / measured of its settings, above 0. Only settings of one group are
            compared.
    """
    errors = sorted(exp(abs(log(a / b))) - 1 for ratios in groups for a, b in combinations(ratios, 2))
    if len(errors) < _PAIRS:
        return None
    p90 = errors[ceil(0.9 * len(errors)) - 1]
    return KnownError(_within(median(errors)), _within(p90))


def _says_something_of_others(one: Observation) -> bool:
    step_s = one.parts.step_s()
    return one.parts.host <= LAUNCHES * step_s and one.parts.compute >= _COMPUTE * step_s


def _agree(settings: Sequence[Observation]) -> bool:
    """Return whether there are several, and their corrected predictions are right."""
    if len(settings) < 2:
        return False
    factors = _fit(settings)
    left = [log(one.measured_s / one.parts.step_s(factors)) for one in settings]
    return max(left) - min(left) <= log(1 + _AGREE)


def _shrunk(factors: Factors, share: float) -> Factors:
    overlap = 1 - (1 - factors.overlap) * share
    return replace(factors, compute=factors.compute**share, communication=factors.communication**share, overlap=overlap)


def _within(error: float) -> float:
    return min(max(error, 0.01), 0.9)  # the range that a device's file allows


def _settings(observations: Iterable[Observation]) -> list[Observation]:
    runs: dict[str, list[Observation]] = defaultdict(list)
    for one in observations:
        runs[one.setting].append(one)
    return [
        replace(some[-1], **{name: median(getattr(one, name) for one in some) for name in ("measured_s", "noise")})
        for some in runs.values()
    ]


def _fit(observations: Sequence[Observation]) -> Factors:
    import numpy as np
    from scipy.optimize import lsq_linear

    parts = np.array([[p.compute + p.host, p.communication, p.hidden] for p in (one.parts for one in observations)])
    noise = np.array([max(one.noise, _NOISE) for one in observations])
    scale = noise * np.array([one.measured_s for one in observations])
    prior = np.array([[1.0, -1.0, 0.0], [0.0, 0.0, 1.0]]) / _APART  # the level has no prior
    table = np.vstack([parts / scale[:, None], prior])
    target = np.concatenate([1 / noise, [0.0, 0.0]])
    compute, communication, shown = lsq_linear(table, target, bounds=([0.05, 0.05, 0.0], [20.0, 20.0, 1.0])).x
    return Factors(float(compute), float(communication), 1 - float(shown), len(observations))
