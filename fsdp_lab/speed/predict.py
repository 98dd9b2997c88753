"""How long a step takes on a device, what bounds it, and how sure that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fsdp_lab.speed.costs import host_seconds, seconds
from fsdp_lab.speed.device import SETTINGS_FOR_ERRORS, Basis, Device, DeviceKind, Factors
from fsdp_lab.speed.program import Kind, Operator, Stream
from fsdp_lab.speed.streams import Schedule, schedule

BOUNDS = ("compute", "gather", "scatter", "transfer", "launch")
# The share of a step from which launches count: of the published steps that efficiencies were fitted to they bound at
# most 0.005 % (experiments/published_speed), so nothing is known of the figures for them.
_LAUNCHES = 0.01
_STEP = 1e-3  # of which the duration of a bound is changed, to see what becomes of the step


@dataclass(frozen=True)
class Parts:
    """Seconds that make up a step, as the device's file has them, before trials correct them.

    Attributes:
        compute: by which the step would be shorter without anything but collectives and launches.
        communication: the same of collectives.
        launch: the same of launches.
        hidden: of what runs at the same time as something else.
    """

    compute: float
    communication: float
    launch: float
    hidden: float


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
        relative: the same of the ratio of two such steps of one group; None where that is not known.
        group: of the steps that `relative` compares; "": it is compared with none.
        basis: where the device's figures are from.
        device: its name.
        samples: that all workers train on in the step.
        parts: what the step is made of, for trials to correct.
        settings: of how many settings the finished trials have corrected it.
        bound_unseen: launches bound more of it than of any step that was looked at: how far off it is is not known.
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
    parts: Parts | None = None
    settings: int = 0
    relative: float | None = None
    group: str = ""
    bound_unseen: bool = False

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
    launches = host_seconds(program, device)
    bounds = [bound_of(operator) for operator in program]
    synchronous = device.kind is DeviceKind.cpu

    def run(slower: str = "", factor: float = 1.0) -> Schedule:
        scaled = [d * factor if b == slower else d for d, b in zip(durations, bounds, strict=True)]
        scale = factor if slower == "launch" else 1.0
        return schedule(program, scaled, [cost * scale for cost in launches], separate_scatter, synchronous)

    found = run()
    exposed = {name: max(found.seconds - run(name, 1 - _STEP).seconds, 0.0) / _STEP for name in {*bounds, "launch"}}
    total = sum(exposed.values()) or 1.0
    hidden = _hidden(durations, launches, synchronous, found.seconds)
    step_s = found.seconds + (1 - device.factors.overlap) * hidden
    bound_unseen = exposed["launch"] / total > _LAUNCHES and not _launches_known(device)
    looked_at = looked_at and not bound_unseen
    most = (device.error if looked_at else device.error_elsewhere).p90
    speed = Speed(
        step_s,
        {name: exposed.get(name, 0.0) / total for name in BOUNDS},
        step_s / (1 + most),
        step_s / (1 - most),
        most,
        device.basis,
        device.name,
        busy={stream.value: busy for stream, busy in found.busy().items()},
        parts=_parts(exposed, hidden, device.factors),
        settings=device.factors.settings,
        relative=device.relative.p90 if looked_at and device.relative is not None else None,
        bound_unseen=bound_unseen,
    )
    return speed, found


def _launches_known(device: Device) -> bool:
    """Whether the device's errors are of steps that launches bound, too: those of a calibration, and of trials."""
    return device.measured is not None or device.factors.settings >= SETTINGS_FOR_ERRORS


def step_seconds(program: Sequence[Operator], device: Device, separate_scatter: bool = False) -> float:
    """Return the seconds of a step, where nothing else of `predict` is wanted."""
    durations = [seconds(operator, device) for operator in program]
    launches, synchronous = host_seconds(program, device), device.kind is DeviceKind.cpu
    found = schedule(program, durations, launches, separate_scatter, synchronous).seconds
    return found + (1 - device.factors.overlap) * _hidden(durations, launches, synchronous, found)


def _hidden(durations: Sequence[float], launches: Sequence[float], synchronous: bool, found: float) -> float:
    """By how many seconds a step is shorter than all that it does, one after the other."""
    return max(sum(durations) + (sum(launches) if synchronous else 0.0) - found, 0.0)


def bound_of(operator: Operator) -> str:
    """Return which of `BOUNDS` an operator's duration counts to."""
    if operator.kind is Kind.gather:
        return "gather"
    if operator.kind.is_collective:
        return "scatter"
    return "transfer" if operator.kind is Kind.transfer or operator.stream is Stream.host else "compute"


def _parts(exposed: Mapping[str, float], hidden: float, factors: Factors) -> Parts:
    communication = exposed.get("gather", 0.0) + exposed.get("scatter", 0.0)
    compute = exposed.get("compute", 0.0) + exposed.get("transfer", 0.0)
    return Parts(compute / factors.compute, communication / factors.communication, exposed["launch"], hidden)
