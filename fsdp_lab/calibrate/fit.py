"""From measurements to a device file: lines through operators, corrected by the times of whole steps."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import least_squares, nnls

from fsdp_lab.speed.device import Device, KnownError
from fsdp_lab.speed.measured import ANY, HostCosts, Line, Measured
from fsdp_lab.speed.pairs import pair_error
from fsdp_lab.speed.predict import step_seconds
from fsdp_lab.speed.program import Kind, Operator

_LEAST_SHARE = 2e-4  # of all seconds: an operator with less has its kind's line
_LARGE = 2.0**22  # bytes up to which a line should be right, even if only smaller operators were measured
_BEYOND = 4.0  # times the largest that was measured, at least
_PRIOR_SAMPLES = 0.3  # the weight of the kind's line there
_FAR = 0.1  # relative errors of steps beyond this weigh less
# Where the fit of whole steps starts, and what a factor of e away from there weighs, as a relative error.
_START = {
    "compute": 1.0,
    "communication": 1.0,
    "operator_s": 2e-5,
    "collective_s": 3e-4,
    "microbatch_s": 5e-4,
    "step_s": 5e-4,
}
_PRIOR = 0.02


@dataclass(frozen=True)
class Sample:
    """One measured operator; see `Line` for its amounts."""

    name: str
    kind: str
    dtype: str
    flops: float
    num_bytes: float
    items: float
    seconds: float


@dataclass(frozen=True)
class Steps:
    """A reference, measured and forecast.

    Attributes:
        family: of its model.
        model: what builds it.
        samples: its operators as measured.
        program: its operators as forecast.
        seconds: of a step.
    """

    family: str
    model: str
    samples: Sequence[Sample]
    program: Sequence[Operator]
    seconds: float


@dataclass(frozen=True)
class Fitted:
    """The result of a fit.

    Attributes:
        measured: the lines and costs, for the device's file.
        errors: predicted / measured - 1 of each reference, by a fit that has not seen its family.
        relative: of the ratio of two such predictions for one model; None: too few.
    """

    measured: Measured
    errors: Sequence[float]
    relative: KnownError | None


def fit(steps: Sequence[Steps], alone: Sequence[Sample], device: Device) -> Fitted:
    """Return the fitted measurements, and their errors for models that the fit has not seen.

    Args:
        steps: the references.
        alone: collectives and attention that ran outside a model.
        device: everything but the measurements; its `measured` names the machine.
    """
    assert device.measured is not None
    theta = _start()

    def lines_of(some: Sequence[Steps]) -> dict[str, dict[str, Line]]:
        return fit_lines([*(sample for one in some for sample in one.samples), *alone])

    def logs(some: Sequence[Steps], lines: Mapping[str, Mapping[str, Line]], at: np.ndarray) -> np.ndarray:
        measured = _at(device.measured, lines, at)
        known = replace(device, measured=measured)
        return np.array([np.log(step_seconds(one.program, known) / one.seconds) for one in some])

    everything = lines_of(steps)
    theta = _solve(lambda at: logs(steps, everything, at), theta)
    errors: dict[int, float] = {}
    for family in sorted({one.family for one in steps}):
        seen = [one for one in steps if one.family != family]
        unseen = {number: one for number, one in enumerate(steps) if one.family == family}
        if not seen:
            continue
        lines = lines_of(seen)
        own = _solve(_linear(lambda at, lines=lines, seen=seen: logs(seen, lines, at), theta), theta)  # type: ignore[misc]
        unseen_errors = logs(list(unseen.values()), lines, own)
        errors |= dict(zip(unseen, np.expm1(unseen_errors).tolist(), strict=True))
    ratios: dict[str, list[float]] = defaultdict(list)
    for number, error in errors.items():
        ratios[steps[number].model].append(1 + error)
    measured = _at(device.measured, everything, theta)
    return Fitted(measured, [errors[n] for n in sorted(errors)], pair_error(ratios.values()))


def known_error(errors: Sequence[float]) -> KnownError:
    """Return the errors' median, and a bound for nine of ten further errors, within a device file's limits.

    Of n errors the bound is number 0.9 * (n + 1) in order of size: one more is as likely to be in any position among
    them ("Distribution-Free Predictive Inference for Regression", Lei et al., 2018, section 2.2).
    """
    if not errors:
        return KnownError(0.2, 0.5)
    ordered = np.sort(np.abs(errors))
    place = min(math.ceil(0.9 * (len(ordered) + 1)), len(ordered))
    low, high = np.quantile(ordered, 0.5, method="higher"), ordered[place - 1]
    return KnownError(round(float(np.clip(low, 0.01, 0.9)), 3), round(float(np.clip(high, 0.02, 0.9)), 3))


def fit_lines(samples: Sequence[Sample]) -> dict[str, dict[str, Line]]:
    """Return a line for each name and dtype that takes a share of the time, and for the others by kind and dtype."""
    total = sum(sample.seconds for sample in samples)
    named: dict[tuple[str, str], list[Sample]] = defaultdict(list)
    lines: dict[str, dict[str, Line]] = defaultdict(dict)
    for kind in sorted({sample.kind for sample in samples}):
        some = [sample for sample in samples if sample.kind == kind]
        lines[kind][ANY] = _line(some)
        arithmetic = kind in (Kind.matmul, Kind.attention)  # of which one dtype tells nothing of another
        for dtype in sorted({sample.dtype for sample in some}):
            prior = None if arithmetic else lines[kind][ANY]
            lines[kind][dtype] = _line([one for one in some if one.dtype == dtype], prior)
        if arithmetic:
            del lines[kind][ANY]
    for sample in samples:
        if not Kind(sample.kind).is_collective:
            named[sample.name, sample.dtype].append(sample)
    for (name, dtype), some in named.items():
        if sum(sample.seconds for sample in some) > _LEAST_SHARE * total:
            lines[name][dtype] = _line(some, lines[some[0].kind][dtype])
    return dict(lines)


def _line(samples: Sequence[Sample], prior: Line | None = None) -> Line:
    """Return the least-squares line without negative coefficients; errors grow with the square root of the seconds.

    Args:
        samples: of one operator or kind.
        prior: a line for sizes beyond the samples, scaled to the samples' speed; None: none.
    """
    table = [[1.0, one.flops, one.num_bytes, one.items] for one in samples]
    target = [max(one.seconds, 1e-9) for one in samples]
    weights = [1.0] * len(samples)
    if prior is not None:
        largest = max(samples, key=lambda one: one.num_bytes)
        times = max(_BEYOND, _LARGE / max(largest.num_bytes, 1.0))
        slower = largest.seconds / max(prior.seconds(largest.flops, largest.num_bytes, largest.items), 1e-9)
        table.append([1.0, largest.flops * times, largest.num_bytes * times, largest.items * times])
        target.append(slower * prior.seconds(*table[-1][1:]))
        weights.append(_PRIOR_SAMPLES)
    rows, seconds = np.array(table), np.array(target)
    scaling = np.sqrt(np.array(weights) / seconds)
    scale = np.maximum(rows.max(axis=0), 1e-30)
    coefficients = nnls(rows / scale * scaling[:, None], seconds * scaling)[0] / scale
    return Line(*(float(f"{value:.4g}") for value in coefficients))


def _at(known: Measured | None, lines: Mapping[str, Mapping[str, Line]], theta: np.ndarray) -> Measured:
    """Return the measurements at theta, with its factors applied to the lines."""
    assert known is not None
    value = dict(zip(_START, np.exp(theta).tolist(), strict=True))
    host = HostCosts(**{name: value[name] for name in vars(known.host)})

    def scaled(name: str, line: Line) -> Line:
        collective = name in set(Kind) and Kind(name).is_collective
        factor = value["communication" if collective else "compute"]
        return Line(*(factor * part for part in vars(line).values()))

    operators = {name: {dtype: scaled(name, line) for dtype, line in some.items()} for name, some in lines.items()}
    return replace(known, operators=operators, host=host)


def _start() -> np.ndarray:
    return np.log(list(_START.values()))


def _solve(errors: Callable[[np.ndarray], np.ndarray], start: np.ndarray) -> np.ndarray:
    prior = _start()
    solution = least_squares(
        lambda theta: np.concatenate([errors(theta), _PRIOR * (theta - prior)]), start,
        loss="soft_l1", f_scale=_FAR, diff_step=1e-3, max_nfev=15, bounds=(prior - 4.0, prior + 4.0),
    )  # fmt: skip
    return np.asarray(solution.x)


def _linear(errors: Callable[[np.ndarray], np.ndarray], centre: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Return a linear approximation of the errors near a point."""
    here, step = errors(centre), 1e-3
    slopes = np.stack([(errors(centre + step * unit) - here) / step for unit in np.eye(len(centre))], axis=1)
    return lambda theta: here + slopes @ (theta - centre)
