"""Efficiencies fitted to measured steps, and two simpler predictions to compare with: `benchmarks.published_speed`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from scipy.optimize import least_squares, nnls

from fsdp_lab.speed.device import Device, Efficiency
from fsdp_lab.speed.predict import predict, step_seconds
from fsdp_lab.speed.program import Kind, Operator, Stream

START = Efficiency(matmul=0.85, attention=0.6, memory=0.6, link=0.6, network=0.4)
_PRIOR = 0.02  # what a factor of e away from the start weighs, as a relative error
_FAR = 0.03  # relative errors beyond this weigh less: some published rows are off for reasons of their own


@dataclass(frozen=True)
class Step:
    """A traced step of few blocks.

    Attributes:
        whole: its program, of two microbatches at most.
        again: the second of them alone, None where there is one.
    """

    whole: Sequence[Operator]
    again: Sequence[Operator] | None

    @classmethod
    def of(cls, program: Sequence[Operator]) -> Step:
        pairs = enumerate(pairwise(program), start=1)
        begins = [i for i, (one, other) in pairs if one.phase == "optimizer" and other.phase == "forward"]
        if not begins:
            return cls(program, None)
        end = max(i for i, operator in enumerate(program) if operator.phase == "backward")
        return cls(program, program[begins[0] : end + 1])


@dataclass(frozen=True)
class Row:
    """A published step.

    Attributes:
        facts: its line of the CSV.
        device: its GPU.
        steps: of `DEPTHS` blocks: `depth -> Step`.
        measured: seconds.
    """

    facts: Mapping[str, str]
    device: Device
    steps: Mapping[int, Step]
    measured: float

    def along_depth(self, of_step: Any) -> Any:
        """Return what a function of a step would be for all blocks, as it is linear in them."""
        (few, first), (more, second) = sorted(self.steps.items())
        low, high = of_step(first), of_step(second)
        return low + (int(self.facts["num_layers"]) - few) * (high - low) / (more - few)

    def seconds(self, efficiency: Efficiency) -> float:
        """Return the predicted seconds of a step."""
        device = replace(self.device, efficiency=efficiency)
        repeats = int(self.facts["grad_accum_steps"]) - 2

        def of(step: Step) -> float:
            return step_seconds(step.whole, device) + (
                repeats * step_seconds(step.again, device) if step.again else 0.0
            )

        return float(self.along_depth(of))

    def launch_share(self, efficiency: Efficiency) -> float:
        """Return the share of the predicted step that launches bound."""
        device = replace(self.device, efficiency=efficiency)
        repeats = int(self.facts["grad_accum_steps"]) - 2

        def of(step: Step) -> np.ndarray:
            sums = np.zeros(2)
            for program, times in ((step.whole, 1), (step.again or [], repeats)):
                if program:
                    speed, _ = predict(program, device)
                    sums += times * speed.step_s * np.array([speed.shares["launch"], 1.0])
            return sums

        launch, step_s = self.along_depth(of)
        return float(launch / step_s)


def fit(rows: Sequence[Row], start: Efficiency = START) -> Efficiency:
    """Return the efficiencies with the least errors. What no row depends on stays where it starts."""
    names = _names(rows)

    def errors(logs: np.ndarray) -> np.ndarray:
        efficiency = _at(start, names, logs)
        return np.array([np.log(row.seconds(efficiency) / row.measured) for row in rows])

    return _solved(errors, names, start)


def refit(rows: Sequence[Row], fitted: Efficiency) -> Callable[[Sequence[int]], Efficiency]:
    """Return what fits efficiencies to some of the rows, by their numbers, from how errors change near those that are
    fitted to others."""
    names = _names(rows)
    centre, step = _logs(fitted, names), 1e-3

    def errors(logs: np.ndarray) -> np.ndarray:
        efficiency = _at(fitted, names, logs)
        return np.array([np.log(row.seconds(efficiency) / row.measured) for row in rows])

    here = errors(centre)
    slopes = np.stack([(here - errors(centre - step * unit)) / step for unit in np.eye(len(names))], axis=1)

    def of(chosen: Sequence[int]) -> Efficiency:
        return _solved(lambda logs: here[chosen] + slopes[chosen] @ (logs - centre), names, fitted)

    return of


def _names(rows: Sequence[Row]) -> list[str]:
    within = all(int(row.facts["num_gpus"]) <= row.device.node_size for row in rows)
    return [name for name in vars(START) if not (within and name == "network")]


def _logs(efficiency: Efficiency, names: Sequence[str]) -> np.ndarray:
    return np.array([np.log(getattr(efficiency, name)) for name in names])


def _at(efficiency: Efficiency, names: Sequence[str], logs: np.ndarray) -> Efficiency:
    return replace(efficiency, **{name: float(np.exp(value)) for name, value in zip(names, logs, strict=True)})


def _solved(errors: Callable[[np.ndarray], np.ndarray], names: Sequence[str], start: Efficiency) -> Efficiency:
    prior = _logs(START, names)
    solution = least_squares(
        lambda logs: np.concatenate([errors(logs), _PRIOR * (logs - prior)]), np.minimum(_logs(start, names), -1e-6),
        bounds=(-5.0, 0.0), loss="soft_l1", f_scale=_FAR, diff_step=1e-3, max_nfev=12,
    )  # fmt: skip
    return _at(start, names, solution.x)


def constant(fitted: Sequence[Row], rows: Sequence[Row]) -> list[float]:
    """Return the seconds that one utilisation predicts: FLOPs with those that are computed again."""

    def at_peak(row: Row) -> float:
        facts = {key: float(row.facts[key]) for key in ("num_params", "num_layers", "hidden_dim", "seq_len")}
        attention = 12 * facts["num_layers"] * facts["hidden_dim"] * facts["seq_len"]
        again = 4 / 3 if row.facts["activation_checkpointing"] == "full" else 1.0
        tokens = float(row.facts["global_batch_size"]) * facts["seq_len"] / float(row.facts["num_gpus"])
        return tokens * again * (6 * facts["num_params"] + attention) / row.device.peak("bfloat16")

    share = float(np.median([at_peak(row) / row.measured for row in fitted]))
    return [at_peak(row) / share for row in rows]


def roofline(fitted: Sequence[Row], rows: Sequence[Row]) -> list[float]:
    """Return the seconds that a sum of five parts predicts, each with a factor of its own: matrix products, attention,
    memory, communication and launches."""

    def parts(row: Row) -> np.ndarray:
        repeats = int(row.facts["grad_accum_steps"]) - 2

        def of(step: Step) -> np.ndarray:
            again = _totals(step.again, row.device) * repeats if step.again else 0.0
            return np.asarray(_totals(step.whole, row.device) + again)

        return np.asarray(row.along_depth(of))

    known = np.array([parts(row) / row.measured for row in fitted])
    scale = known.max(axis=0)
    factors = nnls(known / scale, np.ones(len(fitted)))[0] / scale
    return [float(parts(row) @ factors) for row in rows]


def _totals(program: Sequence[Operator], device: Device) -> np.ndarray:
    """Seconds at the data sheet's peaks, of each kind, and the number of launches."""
    totals = np.zeros(5)
    for one in program:
        if one.kind in (Kind.matmul, Kind.attention):
            totals[int(one.kind is Kind.attention)] += one.flops / device.peak(one.dtype)
        elif one.kind.is_collective:
            across = len(one.group) > device.node_size
            totals[3] += one.num_bytes / (device.network_bandwidth if across else device.link_bandwidth)
        elif one.kind is Kind.memory and one.stream is not Stream.host:
            totals[2] += one.num_bytes / device.memory_bandwidth
        totals[4] += 1
    return totals
