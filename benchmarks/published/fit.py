"""Efficiencies fitted to published rows, so that each row is forecast by numbers that were not fitted to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from scipy.optimize import least_squares

from benchmarks.published.steps import Traced
from fsdp_lab.forecast.speed.device import Efficiency

START = Efficiency(matmul=0.85, attention=0.6, memory=0.6, link=0.6, network=0.4)
_PRIOR = 0.02  # what a factor of e away from the start weighs, as a relative error
_FAR = 0.03  # relative errors beyond this weigh less: some published rows are off for reasons of their own
_STEP = 1e-3
_ROUNDS = 10  # at most, each with new slopes
_SHARES = (1.0, 0.5, 0.2, 0.05)  # line search: slopes hold only near where they were taken
_ENOUGH = 1e-3  # a round that saves a smaller share of the cost is the last


def fit(rows: Sequence[Traced], start: Efficiency = START) -> Efficiency:
    """Return the efficiencies with the least errors. What no row depends on stays where it starts."""
    names, efficiency = _names(rows), start
    for _ in range(_ROUNDS):
        centre, here = _logs(efficiency, names), _errors(rows, efficiency)
        shifted = [_errors(rows, _at(efficiency, names, centre - _STEP * unit)) for unit in np.eye(len(names))]
        slopes = np.stack([(here - each) / _STEP for each in shifted], axis=1)
        there = _logs(_solved(_linear(here, slopes, centre), names, efficiency), names)
        tried = [_at(efficiency, names, centre + share * (there - centre)) for share in _SHARES]
        best, before = min(tried, key=lambda one: _cost(rows, one, names)), _cost(rows, efficiency, names)
        if _cost(rows, best, names) > before * (1 - _ENOUGH):
            break
        efficiency = best
    return efficiency


def _cost(rows: Sequence[Traced], efficiency: Efficiency, names: Sequence[str]) -> float:
    """Return what `_solved` minimises."""
    far = _PRIOR * (_logs(efficiency, names) - _logs(START, names))
    squares = (np.concatenate([_errors(rows, efficiency), far]) / _FAR) ** 2
    return float(np.sum(np.sqrt(1 + squares)))


def without_each(rows: Sequence[Traced], start: Efficiency = START) -> list[Efficiency]:
    """Return for each row the efficiencies that are fitted to all other sizes of model."""
    sizes = [traced.row.model for traced in rows]
    fitted = {size: fit([one for one in rows if one.row.model != size], start) for size in dict.fromkeys(sizes)}
    return [fitted[size] for size in sizes]


def _linear(here: np.ndarray, slopes: np.ndarray, centre: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    return lambda logs: here + slopes @ (logs - centre)


def _errors(rows: Sequence[Traced], efficiency: Efficiency) -> np.ndarray:
    devices = [replace(traced.row.device, efficiency=efficiency) for traced in rows]
    pairs = zip(rows, devices, strict=True)
    return np.array([np.log(traced.seconds(device) / traced.row.measured_s) for traced, device in pairs])


def _names(rows: Sequence[Traced]) -> list[str]:
    """Return what the rows depend on; the network where it is stated."""
    known = any(traced.row.several_nodes and traced.row.device.network_known for traced in rows)
    return [name for name in vars(START) if known or name != "network"]


def _logs(efficiency: Efficiency, names: Sequence[str]) -> np.ndarray:
    return np.array([np.log(getattr(efficiency, name)) for name in names])


def _at(efficiency: Efficiency, names: Sequence[str], logs: np.ndarray) -> Efficiency:
    return replace(efficiency, **{name: float(np.exp(value)) for name, value in zip(names, logs, strict=True)})


def _solved(errors: Callable[[np.ndarray], np.ndarray], names: Sequence[str], start: Efficiency) -> Efficiency:
    prior = _logs(START, names)
    solution = least_squares(
        lambda logs: np.concatenate([errors(logs), _PRIOR * (logs - prior)]), np.minimum(_logs(start, names), -1e-6),
        bounds=(-5.0, 0.0), loss="soft_l1", f_scale=_FAR,
    )  # fmt: skip
    return _at(start, names, solution.x)
