"""The error of the ratio of two predicted times: an error common to all predictions cancels in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from math import ceil, exp, log
from statistics import median

from fsdp_lab.forecast.speed.device import KnownError

_LEAST, _MOST = 0.01, 0.9  # the range that a device's file allows
_PAIRS = 20  # the fewest for a 90th percentile


def pair_error(groups: Iterable[Sequence[float]]) -> KnownError | None:
    """Return the relative error of the ratio of two predicted times; None for fewer than twenty pairs.

    Args:
        groups: for each model the ratios predicted / measured of its settings, above 0. Only settings of one group are
            compared.
    """
    errors = sorted(exp(abs(log(a / b))) - 1 for ratios in groups for a, b in combinations(ratios, 2))
    if len(errors) < _PAIRS:
        return None
    p90 = errors[ceil(0.9 * len(errors)) - 1]
    return KnownError(*(min(max(error, _LEAST), _MOST) for error in (median(errors), p90)))
