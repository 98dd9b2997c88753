"""Efficiencies fitted to published rows, with each source left out in turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from scipy.optimize import least_squares

from benchmarks.published.rows import Row
from benchmarks.published.steps import Traced
from fsdp_lab.forecast.speed.device import Efficiency

# Devices whose kernels are alike share their efficiencies. What one source has alone starts from the H100's.
FAMILIES = {
    "a100": ("a100_80gb", "a100_40gb"),
    "h100": ("h100_sxm", "h100_96gb"),
    "mi300x": ("mi300x",),
    "b200": ("b200",),
}
_NAMES = [each.name for each in fields(Efficiency)]
# Their hosts limit them, to 500 of 700 W in torchtitan's: products and attention run at lower clocks.
_LIMITED = "h100_96gb"
# MPT called kernels of attention of 2022 and 2023, whose share is fitted to its rows alone.
_OLD_KERNELS = "MPT"
_PRIOR = 0.05  # what a factor of e away from the start weighs, as a relative error
_FAR = 0.05  # relative errors beyond this weigh less: some published rows are off for reasons of their own


@dataclass(frozen=True)
class Fit:
    """What was fitted.

    Attributes:
        efficiency: of a family of devices.
        old_attention: the same as its `attention`, for MPT.
        limited: of the rates of products and attention, where a host limits the power.
    """

    efficiency: Efficiency
    old_attention: float = 0.6
    limited: float = 0.85

    def on(self, gpu: str) -> Efficiency:
        """Return the efficiencies of a GPU of the family."""
        one = self.efficiency
        if gpu != _LIMITED:
            return one
        of_products = {name: round(getattr(one, name) * self.limited, 9) for name in ("matmul", "float8", "attention")}
        return replace(one, **of_products)

    def of(self, row: Row) -> Efficiency:
        """Return the efficiencies of a row."""
        one = self.on(row.gpu)
        return replace(one, attention=self.old_attention) if row.source == _OLD_KERNELS else one

    def seconds(self, one: Traced) -> float:
        """Return the predicted seconds of a row's step."""
        return one.seconds(replace(one.row.device, efficiency=self.of(one.row)))

    def logs(self) -> np.ndarray:
        """Return the logarithms of all figures."""
        return np.log([*vars(self.efficiency).values(), self.old_attention, self.limited])

    @classmethod
    def at(cls, logs: np.ndarray, digits: int = 9) -> Fit:
        """Return the figures with these logarithms."""
        *shares, old, limited = (round(float(share), digits) for share in np.exp(logs))
        return cls(Efficiency(**dict(zip(_NAMES, shares, strict=True))), old, limited)


START = Fit(
    Efficiency(matmul=0.85, float8=0.7, attention=0.8, memory=0.7, fused=0.8, link=0.5, network=0.8, overlap=0.85)
)


def fit(rows: Sequence[Traced], start: Fit = START, prior: Fit = START) -> Fit:
    """Return the efficiencies with the least errors; each source weighs the same, whatever its number of rows.

    Rows without a speed, or over several nodes whose network is not stated, do not count, nor two of three rows of MPT.

    Args:
        rows: of one family of devices.
        start: where the search begins.
        prior: what the rows leave open stays near this.
    """
    known = [one for one in rows if one.row.has_speed and not _passed_over(one)]
    if not known:
        return prior
    of_source = Counter(one.row.source for one in known)
    weights = np.array([of_source[one.row.source] ** -0.5 for one in known])

    def residuals(logs: np.ndarray) -> np.ndarray:
        tried = Fit.at(logs)
        errors = np.log([tried.seconds(one) / (one.row.measured_s or 1) for one in known])
        return np.concatenate([weights * errors, _PRIOR * (logs - prior.logs())])

    found = least_squares(
        residuals, np.minimum(start.logs(), -1e-3), bounds=(-5, 0), loss="soft_l1", f_scale=_FAR, diff_step=1e-3,
        ftol=1e-3, max_nfev=12,
    )  # fmt: skip
    return Fit.at(found.x, digits=3)


def _passed_over(one: Traced) -> bool:
    """Return whether a fit leaves out a row: MPT's are many and alike, and a fit prices each a hundred times."""
    return one.row.source == _OLD_KERNELS and int(one.row.name[1:]) % 3 > 0


def families(traced: Sequence[Traced]) -> dict[str, list[Traced]]:
    """Return the rows of each family."""
    return {name: [one for one in traced if one.row.gpu in gpus] for name, gpus in FAMILIES.items()}


def fits(traced: Mapping[str, Sequence[Traced]]) -> dict[str, Fit]:
    """Return the efficiencies of each family."""
    found = {name: fit(traced[name]) for name in ("a100", "h100")}
    return found | {name: fit(traced[name], found["h100"], found["h100"]) for name in ("mi300x", "b200")}


def fits_without(source: str, traced: Mapping[str, Sequence[Traced]], whole: Mapping[str, Fit]) -> dict[str, Fit]:
    """Return the efficiencies of each family that has rows of a source, fitted without these.

    Args:
        source: who published the rows that are left out.
        traced: the rows of each family.
        whole: fitted to all rows, where each search begins.
    """
    others = {name: [one for one in rows if one.row.source != source] for name, rows in traced.items()}
    found = {"h100": fit(others["h100"], whole["h100"])}
    for name in ("a100", "mi300x", "b200"):
        if len(others[name]) < len(traced[name]):
            prior = START if name == "a100" else found["h100"]
            found[name] = fit(others[name], whole[name], prior)
    return found
