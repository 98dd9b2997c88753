"""How sure the ratio of two predicted times is: what is common to all predictions cancels in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from math import ceil, exp, log
from statistics import median

from fsdp_lab.speed.device import KnownError

_LEAST, _MOST = 0.01, 0.9  # what a device's file may say
_PAIRS = 20  # of which nine in ten tell something


def pair_error(groups: Iterable[Sequence[float]]) -> KnownError | None:
    """Return by how much the ratio of two predicted times is off; None of fewer than twenty pairs.

    Args:
        groups: of each model the ratios predicted / measured of its settings, above 0. Only settings of one group are
            compared.
    """
    errors = sorted(exp(abs(log(a / b))) - 1 for ratios in groups for a, b in combinations(ratios, 2))
    if len(errors) < _PAIRS:
        return None
    p90 = errors[ceil(0.9 * len(errors)) - 1]
    return KnownError(*(min(max(error, _LEAST), _MOST) for error in (median(errors), p90)))
