"""Seconds of one operator on one device."""

from __future__ import annotations

import math
from typing import NamedTuple

from fsdp_lab.speed.device import Device, DeviceKind
from fsdp_lab.speed.program import Kind, Operator, Stream

_TILE = (128, 128)  # of a matrix product's result, which one core computes


class _Protocol(NamedTuple):
    """How a ring sends, relative to the plain one: its latencies, and its bandwidth."""

    begin: float = 1.0
    link: float = 1.0
    network: float = 1.0
    bandwidth: float = 1.0


# NCCL's "simple", "LL" and "LL128": the ratios of the latencies of their rings, and the shares of a message that is
# data and no flag, in `src/graph/tuning.cc`.
_PROTOCOLS = {
    DeviceKind.cpu: (_Protocol(),),
    DeviceKind.cuda: (
        _Protocol(),
        _Protocol(6.6 / 8.4, 0.6 / 3.4, 2.7 / 14.0, 0.5),
        _Protocol(14.0 / 8.4, 1.9 / 3.4, 4.0 / 14.0, 120 / 128),
    ),
}


def seconds(operator: Operator, device: Device) -> float:
    """Return how long it takes where nothing else is at work.

    Computing takes as long as the slower of arithmetic and memory ("Roofline", Williams, Waterman and Patterson,
    CACM 52, 2009).
    """
    efficiency, most = device.efficiency, device.reached
    if operator.kind.is_collective:
        return collective_seconds(operator, device)
    if operator.kind is Kind.transfer:
        return operator.num_bytes / device.host_bandwidth
    if operator.stream is Stream.host:
        return operator.num_bytes / device.host_memory_bandwidth
    memory = operator.num_bytes / (device.memory_bandwidth * most.memory * efficiency.memory)
    if operator.kind is Kind.memory or not operator.flops:
        return memory
    if operator.kind is Kind.attention:
        reached = most.attention * efficiency.attention
    else:
        reached = most.matmul * efficiency.matmul
    if operator.shape is not None:
        reached *= occupied(operator.shape, device.num_cores)
    return max(operator.flops / (device.peak(operator.dtype) * reached), memory)


def occupied(shape: tuple[int, int, int, int], num_cores: int) -> float:
    """Return the share of the cores' time that a matrix product uses: its tiles run in waves, the last of which is
    rarely full ("Matrix Multiplication Background User's Guide", NVIDIA, sections on tile and wave quantization)."""
    batch, rows, columns, _ = shape
    tiles = batch * math.ceil(rows / _TILE[0]) * math.ceil(columns / _TILE[1])
    exact = batch * rows * columns / (_TILE[0] * _TILE[1])
    return exact / (math.ceil(tiles / num_cores) * num_cores)


def collective_seconds(operator: Operator, device: Device) -> float:
    """Return the seconds of a ring over the ranks of the group: `n - 1` of its `n` parts pass each link, twice for an
    all-reduce ("Bandwidth Optimal All-reduce Algorithms", Patarasu and Yuan, 2009). Of the protocols it takes the
    fastest, as NCCL does."""
    ranks = len(operator.group)
    if ranks <= 1:
        return 0.0
    passes = 2 if operator.kind is Kind.reduce else 1
    nodes = len({rank // device.node_size for rank in operator.group})
    bandwidth = device.link_bandwidth * device.efficiency.link
    if nodes > 1:  # every ring crosses from node to node, and together they have the node's network
        bandwidth = min(bandwidth, device.network_bandwidth * device.efficiency.network)
    sending = passes * operator.num_bytes * (ranks - 1) / ranks / bandwidth
    between = passes * (nodes - 1 if nodes > 1 else 0)
    within = passes * (ranks - 1) - between
    return min(
        protocol.begin * device.latency_s
        + within * protocol.link * device.link_latency_s
        + between * protocol.network * device.network_latency_s
        + sending / protocol.bandwidth
        for protocol in _PROTOCOLS[device.kind]
    )
