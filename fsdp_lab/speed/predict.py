"""How long a step takes on a device, what bounds it, and how sure that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fsdp_lab.speed.costs import seconds
from fsdp_lab.speed.device import Basis, Device
from fsdp_lab.speed.program import Kind, Operator, Stream
from fsdp_lab.speed.streams import Schedule, schedule

BOUNDS = ("compute", "gather", "scatter", "transfer", "launch")
_STEP = 1e-3  # of which the duration of a bound is changed, to see what becomes of the step


@dataclass(frozen=True)
class Speed:
    """A predicted optimizer step of one worker; the others take as long.

    Attributes:
        step_s: seconds of the step.
        shares: what bounds it -> by how much the step would be shorter, as a share of it, if that took no time, as far
            as a small change tells. They add up to 1.
        low_s: with a chance of nine in ten the measured step is between this
        high_s: and this, by the errors that predictions on this basis had.
        error: of such a prediction, as a share of what is measured, which nine of ten do not exceed.
        basis: where the device's figures are from.
        device: its name.
        samples: that all workers train on in the step.
        tokens: that a sample has; None where samples are what is counted.
        mfu: the model's FLOPs over what the device could do in the step; None where one of them is not known.
    """

    step_s: float
    shares: dict[str, float]
    low_s: float
    high_s: float
    error: float
    basis: Basis
    device: str
    samples: int = 0
    tokens: int | None = None
    mfu: float | None = None
    busy: dict[str, float] = field(default_factory=dict)

    @property
    def bound(self) -> str:
        """What the step would gain most from."""
        return max(self.shares, key=lambda name: self.shares[name])

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.step_s

    @property
    def tokens_per_s(self) -> float | None:
        return None if self.tokens is None else self.samples_per_s * self.tokens


def predict(
    program: Sequence[Operator], device: Device, separate_scatter: bool = False, looked_at: bool = True
) -> tuple[Speed, Schedule]:
    """Predict the step of a program on a device, and when each of its operators runs.

    Args:
        separate_scatter: reductions have a communicator of their own.
        looked_at: the step is of the kind that the device's error is known for.

    Raises:
        ConfigError: the device's file has no peak for what the program computes in.
    """
    durations = [seconds(operator, device) for operator in program]
    bounds = [bound_of(operator) for operator in program]

    def run(slower: str = "", factor: float = 1.0) -> Schedule:
        scaled = [d * factor if b == slower else d for d, b in zip(durations, bounds, strict=True)]
        launch_s = device.launch_s * (factor if slower == "launch" else 1.0)
        return schedule(program, scaled, launch_s, separate_scatter)

    found = run()
    gains = {name: max(found.seconds - run(name, 1 - _STEP).seconds, 0.0) for name in {*bounds, "launch"}}
    total = sum(gains.values()) or 1.0
    most = (device.error if looked_at else device.error_elsewhere).p90
    speed = Speed(
        found.seconds,
        {name: gains.get(name, 0.0) / total for name in BOUNDS},
        found.seconds / (1 + most),
        found.seconds / (1 - most),
        most,
        device.basis,
        device.name,
        busy={stream.value: busy for stream, busy in found.busy().items()},
    )
    return speed, found


def bound_of(operator: Operator) -> str:
    """Return which of `BOUNDS` an operator's duration counts to."""
    if operator.kind is Kind.gather:
        return "gather"
    if operator.kind.is_collective:
        return "scatter"
    return "transfer" if operator.kind is Kind.transfer or operator.stream is Stream.host else "compute"
