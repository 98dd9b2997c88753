"""The predicted time of a step on a device, what bounds it, and its error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from fsdp_lab.forecast.speed.costs import gathers_at, reduces_at, seconds
from fsdp_lab.forecast.speed.device import OTHER, PROBED, UNSEEN, Basis, Device, DeviceKind, Factors, on_network
from fsdp_lab.forecast.speed.program import Kind, Operator, Stream, num_nodes
from fsdp_lab.forecast.speed.streams import schedule

BOUNDS = ("compute", "gather", "scatter", "tp", "transfer", "launch")
_WAITS = ("gather", "scatter", "tp")
# Launches count from this share of a step. In the published steps that efficiencies were fitted to, they bound at most
# 0.005 % (experiments/published), so nothing is known of the figures for launches.
LAUNCHES = 0.01
_OTHER_HOSTS = (1 / 3, 4 / 3)  # assumed: a launch's time on other hosts, relative to the one host that was measured
_STEP = 1e-3  # the relative change of a bound's duration from which its share is extrapolated
NETWORKS = [2 ** (quarter / 4) for quarter in range(-4, 5)]  # half to twice an assumed network


_OFF = 1.5  # a trial with a larger error is not used for other groups, and a single one hardly for its own


@dataclass(frozen=True)
class Parts:
    """Seconds that make up a step by the device's file, before trials correct them.

    Attributes:
        compute: by how much the step would be shorter if everything but collectives and the host took no time.
        communication: the same for collectives.
        host: the same for launches, and for copies to and work of the host.
        hidden: of work that overlaps with other work.
    """

    compute: float
    communication: float
    host: float
    hidden: float

    def step_s(self, factors: Factors | None = None) -> float:
        """Return the seconds of the step as trials correct it; without factors, by the device's file."""
        factors = factors or Factors()
        worked = factors.compute * (self.compute + self.host) + factors.communication * self.communication
        return worked + (1 - factors.overlap) * self.hidden


@dataclass(frozen=True)
class Network:
    """The network between the nodes of a predicted step.

    Attributes:
        gbit: Gbit/s of a node, all its adapters together.
        steps: for an assumed network, Gbit/s -> seconds of the step, from half to twice `gbit`; empty for a known
            network.
        reached: the share of it that gathers and scatters are assumed to reach; None: eight trials of the group give
            the errors, which include it.
        reduced: the same for all-reduces.
    """

    gbit: float
    steps: Mapping[float, float] = field(default_factory=dict)
    reached: float | None = None
    reduced: float = 1.0


@dataclass(frozen=True)
class Speed:
    """A predicted optimizer step of one worker; all workers need the same time.

    Attributes:
        shares: each of `BOUNDS` -> the share by which the step would be shorter if the bound took no time, extrapolated
            from a small change. They add up to 1.
        low_s: the lower end of the range of the measured step, by the errors of predictions on this basis. With an
            assumed network, the range covers half and twice of it.
        high_s: its upper end. If trials of another group corrected the step, the range includes that of the uncorrected
            step.
        error: of such a prediction, as a share of the measured time.
        samples: of all workers in the step.
        tokens: of a sample; None: samples are counted.
        mfu: the model's FLOPs over the device's peak during the step; None: one of them is not known.
        parts: the parts of the step that trials correct.
        factors: the corrections by finished trials.
        relative: the error of the ratio of two such steps of one group; None: not known.
        group: of the steps that `relative` applies to; "": none.
        bound_unseen: launches bound more of it than of any validated step, so its error is not known.
        unlike: text on how it differs from the steps with a known error; the range is then the widest.
        kinds: of the step, see `Errors`.
        sources: the number of sources of `of_sources`; 0: not known.
        of_sources: the error that nine of ten of their steps do not exceed; `error` is larger if later publishers'
            steps had larger errors.
        by_ratio: `error` is that of ratios to the trials that corrected the step.
        network: between the nodes of the step; None: it has one node.
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
    parts: Parts | None = None
    factors: Factors = field(default_factory=Factors)
    relative: float | None = None
    group: str = ""
    bound_unseen: bool = False
    unlike: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    sources: int = 0
    of_sources: float = 0.0
    by_ratio: bool = False
    network: Network | None = None

    @property
    def bound(self) -> str:
        return max(self.shares, key=lambda name: self.shares[name])

    @property
    def correction(self) -> float:
        """The factor by which finished trials correct its time."""
        return self.step_s / self.parts.step_s() if self.parts else 1.0

    @property
    def samples_per_s(self) -> float:
        """Samples/s of all workers together."""
        return self.samples / self.step_s

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens/s of all workers together; None: samples are counted."""
        return None if self.tokens is None else self.samples_per_s * self.tokens


def predict(
    program: Sequence[Operator], device: Device, separate_scatter: bool = False, kinds: Sequence[str] = ("eager",)
) -> Speed:
    """Predict the step of a program on a device.

    Args:
        separate_scatter: reductions have a communicator of their own.
        kinds: of the step, see `Errors`.

    Raises:
        ConfigError: the device's file has no peak for the program's dtype.
    """
    durations = [seconds(operator, device) for operator in program]
    bounds = [_bound_of(operator) for operator in program]

    def run(slower: str = "", factor: float = 1.0) -> float:
        scaled = [d * factor if b == slower else d for d, b in zip(durations, bounds, strict=True)]
        of = _launching(device, factor) if slower == "launch" else device
        return _run(program, scaled, of, separate_scatter)

    plain = run()
    exposed = {name: max(plain - run(name, 1 - _STEP), 0.0) / _STEP for name in {*bounds, "launch"}}
    total = sum(exposed.values()) or 1.0
    of = {name: plain * exposed.get(name, 0.0) / total for name in BOUNDS}
    waits = sum(of[name] for name in _WAITS)
    host = of["transfer"] + of["launch"]
    parts = Parts(plain - waits - host, waits, host, _hidden(program, durations, device, plain))
    bound_unseen = of["launch"] > LAUNCHES * plain and not (device.factors.know_errors or device.knows_host)
    factors, step_s = device.factors, parts.step_s(device.factors)
    of = {name: s * (factors.communication if name in _WAITS else factors.compute) for name, s in of.items()}
    kinds = (OTHER,) if bound_unseen else tuple(kinds)
    if device.knows_host:  # errors of devices with unmeasured hosts do not apply to this one
        kinds = (PROBED,) if device.errors.probed and OTHER not in kinds else (OTHER,)
    relative = device.relative if factors.know_errors or OTHER not in kinds else None
    known = device.errors.of(kinds)
    correction = step_s / plain if plain else 1.0
    by_ratio = factors.alike and not factors.know_errors and (factors.agree or is_near(correction))
    known = relative if relative and by_ratio else known  # the error of a ratio to trials remains
    is_measured = known is relative or factors.know_errors or device.kind is DeviceKind.cpu
    most = known.p90 if is_measured else max(known.p90, *(_unseen(kind) for kind in kinds))
    network = _network(program, device, separate_scatter, correction)
    possible = [step_s, *network.steps.values()] if network else [step_s]
    if bound_unseen:
        possible += [step_s * run("launch", factor) / plain for factor in _OTHER_HOSTS]
    if factors.settings and not factors.alike:  # delays of other steps need not apply to this one
        possible += [one / correction for one in possible]
    return Speed(
        step_s,
        {name: s / (sum(of.values()) or 1.0) for name, s in of.items()},
        min(possible) / (1 + most),
        max(possible) / (1 - most),
        most,
        device.basis,
        device.name,
        parts=parts,
        factors=factors,
        relative=relative.p90 if relative else None,
        kinds=kinds,
        sources=known.sources,
        of_sources=known.p90,
        by_ratio=known is relative,
        bound_unseen=bound_unseen,
        network=network,
    )


def _network(program: Sequence[Operator], device: Device, separate_scatter: bool, correction: float) -> Network | None:
    """Return the network of a step; if it is assumed, with the times on other networks; None within one node."""
    groups = {operator.group for operator in program if operator.kind.is_collective}
    if device.kind is DeviceKind.cpu or not any(num_nodes(group, device.node_size) > 1 for group in groups):
        return None
    gbit, reached = device.network_gbit, None if device.factors.know_errors else gathers_at(device)
    reduced = reduces_at(device)
    if device.network_known or device.factors.know_errors:
        return Network(gbit, reached=reached, reduced=reduced)
    others = [on_network(device, gbit * factor) for factor in NETWORKS]
    steps = {one.network_gbit: correction * step_seconds(program, one, separate_scatter) for one in others}
    return Network(gbit, steps, reached, reduced)


def step_seconds(program: Sequence[Operator], device: Device, separate_scatter: bool = False) -> float:
    """Return the seconds of a step by the device's file, without the other results of `predict`."""
    return _run(program, [seconds(operator, device) for operator in program], device, separate_scatter)


def _run(program: Sequence[Operator], durations: Sequence[float], device: Device, separate_scatter: bool) -> float:
    """Return the seconds until the last operator ends, including losses where collectives overlap with other work."""
    synchronous = device.kind is DeviceKind.cpu
    slots = schedule(
        program, durations, device.launch_s, separate_scatter, synchronous, device.node_size, device.compiled_launch_s
    )
    end = max((slot.end for slot in slots), default=0.0)
    hideable = [op.kind.is_collective and op.stream is not Stream.layers for op in program]  # layers wait
    sent = sum(d for d, hides in zip(durations, hideable, strict=True) if hides)
    return end + (1 - device.efficiency.overlap) * min(sent, _hidden(program, durations, device, end))


def _hidden(program: Sequence[Operator], durations: Sequence[float], device: Device, step_s: float) -> float:
    """Return by how many seconds a step is shorter than all its operators in sequence."""
    compiled = device.launch_s if device.compiled_launch_s is None else device.compiled_launch_s
    launches = sum(compiled if one.compiled else device.launch_s for one in program)
    return max(sum(durations) + (launches if device.kind is DeviceKind.cpu else 0.0) - step_s, 0.0)


def _launching(device: Device, factor: float) -> Device:
    """Return the device with launch times multiplied by a factor."""
    compiled = device.compiled_launch_s
    return replace(
        device, launch_s=device.launch_s * factor, compiled_launch_s=None if compiled is None else compiled * factor
    )


def _bound_of(operator: Operator) -> str:
    if operator.stream is Stream.layers:
        return "tp"
    if operator.kind is Kind.gather:
        return "gather"
    if operator.kind.is_collective:
        return "scatter"
    return "transfer" if operator.kind is Kind.transfer or operator.stream is Stream.host else "compute"


def _unseen(kind: str) -> float:
    return max(UNSEEN.values()) if kind == OTHER else UNSEEN.get(kind, 0.0)


def is_near(ratio: float) -> bool:
    """Return whether a measured step is as predicted, up to the differences between hosts."""
    return 1 / _OFF <= ratio <= _OFF
