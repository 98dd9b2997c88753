"""Latencies and bandwidths by least squares, from collectives timed between ranks and from tables of nccl-tests."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fsdp_lab.config import ConfigError
from fsdp_lab.forecast.speed.costs import ALONE, collective_seconds, network_alone
from fsdp_lab.forecast.speed.program import Kind, Operator, Stream, num_nodes
from fsdp_lab.probe.cases import operator
from fsdp_lab.probe.figures import Measurement
from fsdp_lab.probe.timer import Case

_SIZES = {"cuda": tuple(2**n for n in range(20, 31, 2)), "cpu": tuple(2**n for n in range(20, 27, 2))}  # bytes
_FEWEST = 4  # sizes large enough for a bandwidth
_SENT = {"all_gather": Kind.gather, "reduce_scatter": Kind.scatter, "all_reduce": Kind.reduce}
_BESIDE = 8  # products that run during a gather
# size, count, type, operation, root; then out of place: microseconds, and two bandwidths
_ROW = re.compile(r"^ *(\d+) +\d+ +\w+ +\w+ +-?\d+ +([\d.]+) +[\d.]+ +[\d.]+ ", re.MULTILINE)
_RANK = re.compile(r"^# +Rank +(\d+) .*? on +(\S+) +device", re.MULTILINE)


class Sent(NamedTuple):
    """A collective that was measured."""

    operator: Operator
    seconds: float
    spread: float = 0.0


class Log(NamedTuple):
    """The table of a program of nccl-tests.

    Attributes:
        places: the node of each rank, and its device there.
        rows: bytes, and their seconds.
    """

    kind: Kind
    places: tuple[tuple[int, int], ...]
    rows: tuple[tuple[int, float], ...]

    def sent(self, node_size: int) -> list[Sent]:
        """Return the collectives, with ranks numbered as on full nodes."""
        group = tuple(node * node_size + index for node, index in self.places)
        return [Sent(_sent(self.kind, size, group), seconds) for size, seconds in self.rows]


def collective_cases(device: torch.device, ranks: Sequence[int], group: dist.ProcessGroup | None) -> list[Case]:
    """Return the collectives of some ranks, of which this is one, at all sizes."""
    return [_collective(kind, size, device, ranks, group) for kind in _SENT.values() for size in _SIZES[device.type]]


def _collective(
    kind: Kind, size: int, device: torch.device, ranks: Sequence[int], group: dist.ProcessGroup | None
) -> Case:
    def make() -> Callable[[int], object]:
        start = _starts(kind, size, device, len(ranks), group)
        return lambda _: start().wait()

    return Case([_sent(kind, size, tuple(ranks))], make)


def _sent(kind: Kind, size: int, ranks: tuple[int, ...]) -> Operator:
    stream = Stream.gather if kind is Kind.gather else Stream.scatter
    return operator(f"c10d.{kind}", kind, stream, num_bytes=size, group=ranks)


def _starts(kind: Kind, size: int, device: torch.device, ranks: int, group: Any) -> Callable[[], Any]:
    part = torch.zeros(size // 4 // ranks, device=device)
    whole, rest = torch.zeros(part.numel() * ranks, device=device), {"group": group, "async_op": True}
    return {
        Kind.gather: lambda: dist.all_gather_into_tensor(whole, part, **rest),
        Kind.scatter: lambda: dist.reduce_scatter_tensor(part, whole, **rest),
        Kind.reduce: lambda: dist.all_reduce(whole, **rest),
    }[kind]


def measure_links(measured: Measurement, cases: Sequence[Case]) -> None:
    """Set the latencies and the bandwidth of a node's links, or of the network between nodes, from the collectives."""
    sizes, sent = sorted({case.program[0].num_bytes for case in cases}), list[Sent]()
    for size in sizes:  # the smallest first, as long as there is time
        of_size = [case for case in cases if case.program[0].num_bytes == size]
        enough = size > sizes[_FEWEST - 1]
        name = f"collectives of {size / 2**20:.0f} MiB" if enough else "collectives"
        if not (times := measured.timed(name, of_size)):
            if not enough:
                return
            break
        sent += [Sent(case.program[0], *t) for case, t in zip(of_size, times, strict=True)]
    fit_links(measured, sent)


def fit_links(measured: Measurement, sent: Sequence[Sent]) -> None:
    """Set the figures by which a forecast predicts these collectives of one group.

    The bandwidth is the slope of a line through the larger half of the messages, by least squares of relative errors.
    The latencies get the factor with which a forecast predicts the smaller half.
    """
    device, group = measured.device, sent[0].operator.group
    within = num_nodes(group, device.node_size) == 1
    if not within:  # the share for all-reduces follows from that for gathers
        sent = [one for one in sent if one.operator.kind is not Kind.reduce]
    if not sent:
        measured.left["efficiency.network"] = "needs gathers or scatters"
        return
    ordered = sorted(sent, key=lambda one: one.operator.num_bytes)
    middle = math.sqrt(ordered[0].operator.num_bytes * ordered[-1].operator.num_bytes)
    small = [one for one in ordered if one.operator.num_bytes <= middle]
    large = [one for one in ordered if one.operator.num_bytes > middle] or small
    spread = max(one.spread for one in sent)
    rate = 1 / _slope([(_passed(one.operator), one.seconds) for one in large])
    if within:
        measured.put("link_bandwidth", rate / ALONE, spread)  # what tensor-parallel layers send reaches this share
        measured.put("efficiency.link", ALONE, spread)
    else:
        part = min(1.0, len(group) / num_nodes(group, device.node_size) / device.node_size)  # of the devices of a node
        share = min(1.0, rate / device.network_bandwidth / part) / network_alone(device)
        measured.put("efficiency.network", share, spread)
    measured.fit(
        ("latency_s", "link_latency_s") if within else ("network_latency_s",),
        lambda device: median(collective_seconds(one.operator, device) / one.seconds for one in small), spread,
        "no latency makes a forecast of small messages as long as they took",
    )  # fmt: skip


def _passed(one: Operator) -> float:
    """Return the bytes that pass over each link."""
    ranks = len(one.group)
    return (2 if one.kind is Kind.reduce else 1) * one.num_bytes * (ranks - 1) / ranks


def _slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the slope of the line through points whose squared relative errors are the least."""
    relative = torch.tensor([(1 / y, x / y) for x, y in points], dtype=torch.float64)
    _, slope = torch.linalg.lstsq(relative, torch.ones(len(points), 1, dtype=torch.float64)).solution.flatten().tolist()
    return slope if slope > 0 else median(y / x for x, y in points)


def measure_overlap(measured: Measurement, product: Case, device: torch.device, ranks: Sequence[int]) -> None:
    """Set the share of time that overlap saves, from products and a gather timed together and alone."""
    size = _SIZES[device.type][-2]
    gather = _collective(Kind.gather, size, device, ranks, None)

    def products() -> Callable[[int], object]:
        compute = product.make()
        return lambda n: [compute(n) for _ in range(_BESIDE)]

    def both() -> Callable[[int], object]:
        compute, start = products(), _starts(Kind.gather, size, device, len(ranks), None)

        def run(n: int) -> None:
            work = start()
            compute(n)
            work.wait()

        return run

    computed = Case([*product.program] * _BESIDE, products)
    together = Case([*gather.program, *computed.program], both)
    if times := measured.timed("efficiency.overlap", [computed, gather, together]):
        one, other, side_by_side = (t.seconds for t in times)
        hidden = 1 - (side_by_side - max(one, other)) / min(one, other)
        measured.put("efficiency.overlap", min(max(hidden, 0.01), 1.0), max(t.spread for t in times))


def read_nccl_log(file: Path) -> Log:
    """Return the out-of-place rows from 1 MiB of a table that nccl-tests printed.

    Raises:
        ConfigError: the file cannot be read, or is no such table.
    """
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"nccl={file} cannot be read: {error}; name the output of all_gather_perf.") from error
    hosts = dict(_RANK.findall(text))
    named = [name for name in _SENT if name in text or name in file.name]
    rows = tuple((int(size), float(us) / 1e6) for size, us in _ROW.findall(text) if int(size) >= _SIZES["cuda"][0])
    if not rows or len(hosts) < 2 or len(named) != 1:
        raise ConfigError(
            f"nccl={file} is no table of nccl-tests with two ranks and 1 MiB or more, whose name or text names one of "
            f"{', '.join(_SENT)}; save what all_gather_perf prints, as in mpirun ... all_gather_perf > all_gather.log."
        )
    nodes, of_ranks = list(dict.fromkeys(hosts.values())), [*hosts.values()]
    places = tuple((nodes.index(host), of_ranks[:n].count(host)) for n, host in enumerate(of_ranks))
    return Log(_SENT[named[0]], places, rows)
