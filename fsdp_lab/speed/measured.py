"""The measurements of a calibration: seconds of a machine's operators, its collectives and of Python."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from fsdp_lab.config import ConfigError
from fsdp_lab.speed.program import Kind, Operator

ANY = "any"  # stands for every dtype
_TILE_COLUMNS = 512  # keys of a tile of attention
_VERSION = 2  # of the amounts: since 2 attention has tiles
MAX_OTHERS_CPU = 0.1  # the share of the cores that other processes may use during a measurement


@dataclass(frozen=True)
class Line:
    """Seconds of an operator: `fixed_s + flops * s_per_flop + bytes * s_per_byte + items * s_per_item`.

    For a collective the bytes are those that one rank sends. Items are the matrices of a batched product, and in
    attention the tiles of all heads.
    """

    fixed_s: float
    s_per_flop: float
    s_per_byte: float
    s_per_item: float = 0.0

    def seconds(self, flops: float, num_bytes: float, items: float = 0.0) -> float:
        """Return the seconds of an operator with these amounts."""
        return self.fixed_s + flops * self.s_per_flop + num_bytes * self.s_per_byte + items * self.s_per_item


@dataclass(frozen=True)
class HostCosts:
    """Seconds of Python in addition to the operators.

    Attributes:
        operator_s: of each operator: modules, autograd, dispatching.
        collective_s: of each gather and each scatter: the hooks of FSDP2.
        microbatch_s: of each forward and backward pass.
        step_s: of each optimizer step.
    """

    operator_s: float
    collective_s: float
    microbatch_s: float
    step_s: float


@dataclass(frozen=True)
class Measured:
    """The measurements of a machine.

    Attributes:
        machine: its name.
        torch: the version of PyTorch.
        workers: how many ranks trained side by side.
        cores: cores that they shared.
        others: the share of these cores that other processes used meanwhile.
        operators: PyTorch's name, or a `Kind` for operators without a line of their own -> dtype -> line.
        host: costs of Python.
    """

    machine: str
    torch: str
    workers: int
    cores: int
    others: float
    operators: Mapping[str, Mapping[str, Line]]
    host: HostCosts

    def seconds(self, operator: Operator) -> float:
        """Return the seconds of an operator that runs alone.

        Raises:
            ConfigError: no operator was measured in its dtype.
        """
        if not operator.kind.is_collective:
            return self._line(operator).seconds(*amounts(operator))
        ranks = len(operator.group)
        if ranks <= 1:
            return 0.0
        line = self._line(operator)
        steps = (ranks - 1) / max(self.workers - 1, 1)
        return line.fixed_s * steps + sent_bytes(operator) * line.s_per_byte

    def host_seconds(self, program: Sequence[Operator]) -> list[float]:
        """Return the seconds of Python before each operator of a step."""
        seconds, before = [], "optimizer"
        for place, operator in enumerate(program):
            cost = self.host.operator_s + self.host.step_s * (place == 0)
            cost += self.host.microbatch_s * (operator.phase == "forward" != before)
            cost += self.host.collective_s * (operator.kind in (Kind.gather, Kind.scatter))
            seconds.append(cost)
            before = operator.phase
        return seconds

    def _line(self, operator: Operator) -> Line:
        for name in (operator.name, operator.kind.value):
            lines = self.operators.get(name, {})
            for dtype in (operator.dtype, ANY):
                if dtype in lines:
                    return lines[dtype]
        known = ", ".join(sorted(self.operators.get(operator.kind.value, {})))
        if operator.kind.is_collective and not known:
            raise ConfigError(
                f"{self.machine} was calibrated with one worker, which sends nothing; run python -m fsdp_lab.calibrate "
                "with workers=2 or more."
            )
        raise ConfigError(
            f"no {operator.kind.value} in {operator.dtype or 'any dtype'} was measured on {self.machine}, only in "
            f"{known}; use a precision that computes in one of these."
        )


def amounts(operator: Operator) -> tuple[float, float, float]:
    """Return the FLOPs, bytes and items of an operator, from which its line gives the seconds.

    PyTorch's attention on a CPU (`FlashAttentionKernel.cpp`) divides each head into tiles. Each has matrix products of
    its own, which take the time of a call however small they are, and a causal mask skips only whole tiles.
    """
    flops, parts = operator.flops, 0.0
    if operator.shape is not None:
        heads, rows, columns, _ = operator.shape
        parts = float(heads)
        if operator.kind is Kind.attention:
            parts *= math.ceil(rows / _tile_rows(rows)) * math.ceil(columns / _TILE_COLUMNS)
            if "_for_cpu" in operator.name and columns <= _TILE_COLUMNS:
                products = 5 if operator.name.endswith("_backward") else 2
                flops = products * 2.0 * math.prod(operator.shape)
    return flops, float(operator.num_bytes), parts


def _tile_rows(queries: int) -> int:
    return 256 if queries >= 768 else 64 if queries >= 192 else 32


def sent_bytes(operator: Operator) -> float:
    """Return the bytes that each rank of a collective sends around a ring."""
    ranks = len(operator.group)
    passes = 2 if operator.kind is Kind.reduce else 1
    return passes * operator.num_bytes * (ranks - 1) / max(ranks, 1)


def read_measured(content: Mapping[str, Any], where: str) -> Measured:
    """Return the measurements in a device's file.

    Args:
        content: the values under `measured`.
        where: the file's name, for messages.

    Raises:
        ConfigError: a key is missing or unknown, or a value is invalid.
    """
    try:
        if content.get("version") != _VERSION:
            raise ValueError(f"version is not {_VERSION}")
        operators = {
            str(name): {str(dtype): Line(*map(float, line)) for dtype, line in lines.items()}
            for name, lines in content["operators"].items()
        }
        host = HostCosts(**{name: float(value) for name, value in content["host"].items()})
        names = {name: str(content[name]) for name in ("machine", "torch")}
        measured = Measured(
            **names, workers=int(content["workers"]), cores=int(content["cores"]), others=float(content["others"]),
            operators=operators, host=host,
        )  # fmt: skip
        if unknown := set(content) - set(vars(measured)) - {"version"}:
            raise ValueError(f"unknown {sorted(unknown)}")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{where}: measured cannot be read ({error}); run python -m fsdp_lab.calibrate again."
        ) from None
    numbers = [value for lines in operators.values() for line in lines.values() for value in vars(line).values()]
    if not all(0 <= number < math.inf for number in [*numbers, *vars(host).values(), measured.others]):
        raise ConfigError(
            f"{where}: measured has a time that is negative or not a number; run python -m fsdp_lab.calibrate again."
        )
    return measured


def plain_measured(measured: Measured) -> dict[str, Any]:
    """Return measurements as plain values, which `read_measured` reads."""
    content = {"version": _VERSION, **{each.name: getattr(measured, each.name) for each in fields(Measured)}}
    content["operators"] = {
        name: {dtype: list(vars(line).values()) for dtype, line in sorted(lines.items())}
        for name, lines in sorted(measured.operators.items())
    }
    content["host"] = dict(vars(measured.host))
    return content
