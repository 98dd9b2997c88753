"""The figures of a device, fitted so that a forecast's formulas return the measured seconds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, NamedTuple, TypeVar

from fsdp_lab.config import UserError
from fsdp_lab.forecast.speed.costs import occupied
from fsdp_lab.forecast.speed.device import Basis, Device, DeviceKind, Efficiency, Errors, KnownError, Reached
from fsdp_lab.forecast.speed.predict import step_seconds
from fsdp_lab.forecast.speed.program import Operator
from fsdp_lab.probe.timer import BUSY, Case, Timed

T = TypeVar("T")
# Raised when a kernel, a compiler or memory is missing, and by a step that cannot run here.
_CANNOT = (RuntimeError, ImportError, OSError, UserError)
# The error of a step on a device without a data sheet: assumed, until a probe has measured steps (`--steps`).
_ASSUMED = Errors(KnownError(0.15, 0.3))


class Figure(NamedTuple):
    """A figure of a device: its name in the file, its values before and after, and the spread of its medians."""

    name: str
    before: float | None
    value: float
    spread: float

    @property
    def is_busy(self) -> bool:
        return self.spread > BUSY


def blank(name: str, kind: DeviceKind, memory_gib: float, num_cores: int, node_size: int) -> Device:
    """Return a device without a data sheet: the assumed values of figures that a probe does not measure."""
    return Device(
        name, kind, Basis.data_sheet, memory_gib, {}, 1e12, num_cores, 1e11, node_size, 5e10, 5e10, 3e10, 5e-5, 8.4e-6,
        3.4e-6, 14e-6, Reached(1.0, 0.5, 1.0, 0.5), Efficiency(1.0, 1.0, 1.0, 0.7, 0.7, 0.8, 0.5, 0.8), _ASSUMED,
    )  # fmt: skip


@dataclass
class Measurement:
    """A device while its figures are measured, one by one.

    Attributes:
        device: with the figures measured so far.
        before: the device according to its data sheet; None: it has none.
        time: times a case; a test puts the rates of a known device here.
        is_late: returns whether too little time is left for another figure, given its seconds.
        figures: the measured ones.
        left: what was not measured, and why.
    """

    device: Device
    before: Device | None
    time: Callable[[Case], Timed]
    is_late: Callable[[float], bool] = lambda needs_s: False
    figures: list[Figure] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        errors = Errors(self.device.errors.other)
        self.device = replace(self.device, basis=Basis.probed, errors=errors, relative=None)

    def timed(self, name: str, cases: Sequence[Case], needs_s: float = 0.0) -> list[Timed]:
        """Return the seconds of these cases; empty, with the reason in `left`, if they cannot run or time is short."""
        return self.attempt(name, lambda: [self.time(case) for case in cases], needs_s) or []

    def attempt(self, name: str, call: Callable[[], T], needs_s: float = 0.0) -> T | None:
        """Return the result of a call; None, with the reason in `left`, if it cannot run or time is short."""
        if self.is_late(needs_s):
            self.left[name] = "no time was left"
            return None
        try:
            return call()
        except _CANNOT as error:
            self.left[name] = " ".join(str(error).split())[:100] or type(error).__name__
            return None

    def has(self, name: str) -> bool:
        """Return whether a figure was measured."""
        return any(figure.name == name for figure in self.figures)

    def put(self, name: str, value: float, spread: float) -> None:
        """Set a figure, by its dotted name in the file."""
        self.figures.append(Figure(name, _value(self.before, name), value, spread))
        self.device = _with(self.device, name, value)

    def rate(self, name: str, case: Case, of: float = 1.0) -> None:
        """Set a bandwidth in bytes/s, or a share of a peak, from cases with one operator."""
        for time in self.timed(name, [case]):
            self.put(name, case.program[0].num_bytes / time.seconds / of, time.spread)

    def share(self, name: str, cases: Sequence[Case], needs_s: float = 0.0) -> None:
        """Multiply a share by the median over the cases of predicted / measured seconds."""
        if times := self.timed(name, cases, needs_s):
            device = replace(self.device, launch_s=0.0, compiled_launch_s=None)
            ratio = median(step_seconds(c.program, device) / t.seconds for c, t in zip(cases, times, strict=True))
            self.put(name, (_value(self.device, name) or 0.0) * ratio, max(t.spread for t in times))

    def fit(self, names: Sequence[str], ratio: Callable[[Device], float], spread: float, why: str) -> None:
        """Multiply figures by the factor with which the forecast equals the measured time.

        Args:
            ratio: returns forecast / measured on a device; it grows with the figures.
            why: the reason to record if no factor does.
        """

        def scaled(factor: float) -> Device:
            device = self.device
            for name in names:
                device = _with(device, name, factor * (_value(device, name) or device.launch_s))
            return device

        low, high = 1e-4, 1e4
        if not ratio(scaled(low)) < 1 <= ratio(scaled(high)):
            self.left |= dict.fromkeys(names, why)
            return
        for _ in range(60):
            middle = math.sqrt(low * high)
            low, high = (low, middle) if ratio(scaled(middle)) > 1 else (middle, high)
        device = scaled(high)
        for name in names:
            self.put(name, _value(device, name) or 0.0, spread)

    def products(self, by_dtype: dict[str, list[Case]]) -> None:
        """Set the share of the peak that matrix products reach, by dtype; `reached.matmul` first.

        Without a data sheet, the best case is the peak.
        """
        main = next(iter(by_dtype))
        for dtype, cases in by_dtype.items():
            if not (times := self.timed(f"products in {dtype}", cases)):
                continue
            rates = [sum(o.flops / self._occupied(o) for o in case.program) / t.seconds
                     for case, t in zip(cases, times, strict=True)]  # fmt: skip
            spread = max(t.spread for t in times)
            if dtype not in self.device.peak_flops:
                self.device = replace(self.device, peak_flops={**self.device.peak_flops, dtype: max(rates)})
            share = median(rates) / self.device.peak(dtype)
            if dtype.startswith("float8"):
                self.put("efficiency.float8", share / self.device.reached.matmul, spread)
            else:
                name = "reached.matmul" if dtype == main else f"product_shares.{dtype}"
                self.put(name, share / self.device.efficiency.matmul, spread)

    def _occupied(self, operator: Operator) -> float:
        if operator.shape is None or self.device.kind is DeviceKind.cpu:
            return 1.0
        return occupied(operator.shape, self.device.num_cores)


def _value(device: Device | None, name: str) -> float | None:
    value: Any = device
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
    return value


def _with(device: Device, name: str, value: float) -> Device:
    top, _, rest = name.partition(".")
    old: Any = getattr(device, top)
    new: Any = value
    if rest:
        new = {**(old or {}), rest: value} if isinstance(old, dict | None) else replace(old, **{rest: value})
    changed: dict[str, Any] = {top: new}
    return replace(device, **changed)
