"""Finished trials correct the predictions for their device: compute, communication and overlap."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import ceil, exp, log
from statistics import median

from fsdp_lab.forecast.speed.device import SETTINGS_FOR_ERRORS, Basis, Device, Factors, KnownError
from fsdp_lab.forecast.speed.predict import Parts

_NOISE = 0.1  # of a trial, as a relative error
# Prior widths: how far from 1 a factor may be before a trial has run.
_COMPUTE, _COMMUNICATION, _OVERLAP = 0.3, 0.5, 0.5
_PAIRS = 20  # the fewest for a 90th percentile


@dataclass(frozen=True)
class Observation:
    """The step of a finished trial.

    Attributes:
        setting: an identifier, equal for runs of one setting.
        parts: of the step as predicted, uncorrected.
        measured_s: its seconds, without waiting for data.
        device: the digest of the figures that it was predicted by.
    """

    setting: str
    parts: Parts
    measured_s: float
    torch: str
    device: str


def refine(device: Device, observations: Iterable[Observation]) -> Device:
    """Return the device as finished trials correct it, or unchanged without trials.

    The factors minimise the squares of the relative errors, and stay near 1 if the trials do not determine them. With
    eight settings or more, the errors come from leaving one setting out at a time, and are at least half of the earlier
    ones.
    """
    settings = _settings(observations)
    if not settings:
        return device
    refined = replace(device, basis=Basis.trials, factors=_fit(settings))
    if len(settings) < SETTINGS_FOR_ERRORS:
        return refined
    ratios = [
        _predicted(one, _fit([*settings[:place], *settings[place + 1 :]])) / one.measured_s
        for place, one in enumerate(settings)
    ]
    errors = sorted(abs(ratio - 1) for ratio in ratios)
    p90 = errors[min(len(errors) - 1, int(0.9 * len(errors)))]
    error = KnownError(_within(median(errors)), _within(max(p90, device.error.p90 / 2)))
    pairs = pair_error([ratios])
    assert pairs is not None  # eight settings make 28
    relative = KnownError(pairs.median, _within(max(pairs.p90, (device.relative or device.error).p90 / 2)))
    return replace(refined, error=error, error_elsewhere=error, relative=relative)


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


def _within(error: float) -> float:
    return min(max(error, 0.01), 0.9)  # what a device's file allows


def _settings(observations: Iterable[Observation]) -> list[Observation]:
    runs: dict[str, list[Observation]] = defaultdict(list)
    for one in observations:
        runs[one.setting].append(one)
    return [replace(some[-1], measured_s=median(one.measured_s for one in some)) for some in runs.values()]


def _predicted(one: Observation, factors: Factors) -> float:
    parts = one.parts
    shown = (1 - factors.overlap) * parts.hidden
    return factors.compute * parts.compute + factors.communication * parts.communication + parts.launch + shown


def _fit(observations: Sequence[Observation]) -> Factors:
    import numpy as np
    from scipy.optimize import lsq_linear

    rows = [[one.parts.compute, one.parts.communication, one.parts.hidden] for one in observations]
    rest = [one.measured_s - one.parts.launch for one in observations]
    scale = np.array([_NOISE * one.measured_s for one in observations])
    prior, widths = np.array([1.0, 1.0, 0.0]), np.array([_COMPUTE, _COMMUNICATION, _OVERLAP])
    table = np.vstack([np.array(rows) / scale[:, None], np.diag(1 / widths)])
    target = np.concatenate([np.array(rest) / scale, prior / widths])
    compute, communication, shown = lsq_linear(table, target, bounds=([0.05, 0.05, 0.0], [20.0, 20.0, 1.0])).x
    return Factors(float(compute), float(communication), 1 - float(shown), len(observations))
