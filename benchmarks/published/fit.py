"""Efficiencies fitted to published rows, with each source left out in turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from scipy.optimize import least_squares

from benchmarks.published.steps import Traced
from fsdp_lab.forecast.speed.device import Efficiency

# Devices whose kernels are alike share their efficiencies. What one source has alone starts from the H100's.
FAMILIES = {
    "a100": ("a100_80gb", "a100_40gb"),
    "h100": ("h100_sxm", "h100_96gb"),
    "mi300x": ("mi300x",),
    "b200": ("b200",),
}
START = Efficiency(matmul=0.85, float8=0.7, attention=0.8, memory=0.7, fused=0.5, link=0.5, network=0.4)
_PRIOR = 0.05  # what a factor of e away from the start weighs, as a relative error
_FAR = 0.05  # relative errors beyond this weigh less: some published rows are off for reasons of their own


def fit(rows: Sequence[Traced], start: Efficiency = START, prior: Efficiency = START) -> Efficiency:
    """Return the efficiencies with the least errors; each source weighs the same, whatever its number of rows.

    Rows over several nodes whose network is not stated do not count.

    Args:
        rows: of one family of devices.
        start: where the search begins.
        prior: what the rows leave open stays near this.
    """
    known = [one for one in rows if one.row.network_known]
    if not known:
        return prior
    of_source = Counter(one.row.source for one in known)
    weights = np.array([of_source[one.row.source] ** -0.5 for one in known])
    names = [*vars(START)]

    def residuals(logs: np.ndarray) -> np.ndarray:
        efficiency = Efficiency(*np.exp(logs))
        errors = np.log([seconds(one, efficiency) / one.row.measured_s for one in known])
        return np.concatenate([weights * errors, _PRIOR * (logs - _logs(prior, names))])

    begin = np.minimum(_logs(start, names), -1e-3)
    found = least_squares(
        residuals, begin, bounds=(-5, 0), loss="soft_l1", f_scale=_FAR, diff_step=1e-3, ftol=1e-4, max_nfev=20
    )
    return Efficiency(*(round(float(share), 3) for share in np.exp(found.x)))


def _logs(efficiency: Efficiency, names: Sequence[str]) -> np.ndarray:
    return np.log([getattr(efficiency, name) for name in names])


def seconds(one: Traced, efficiency: Efficiency) -> float:
    """Return the predicted seconds of a row's step by these efficiencies."""
    return one.seconds(replace(one.row.device, efficiency=efficiency))


def families(traced: Sequence[Traced]) -> dict[str, list[Traced]]:
    """Return the rows of each family."""
    return {name: [one for one in traced if one.row.gpu in gpus] for name, gpus in FAMILIES.items()}


def fits(
    traced: Mapping[str, Sequence[Traced]], without: str = "", start: Mapping[str, Efficiency] | None = None
) -> dict[str, Efficiency]:
    """Return the efficiencies of each family, without the rows of a source.

    Args:
        traced: the rows of each family.
        start: where each search begins; None: at `START`.
    """
    left = {name: [one for one in rows if one.row.source != without] for name, rows in traced.items()}
    begin = start or dict.fromkeys(traced, START)
    found = {name: fit(left[name], begin[name]) for name in ("a100", "h100")}
    return found | {name: fit(left[name], begin[name], found["h100"]) for name in ("mi300x", "b200")}
