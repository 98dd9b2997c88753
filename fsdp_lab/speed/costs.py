"""Seconds of one operator on one device."""

from __future__ import annotations

import math

from fsdp_lab.speed.device import Device
from fsdp_lab.speed.program import Kind, Operator, Stream

_TILE = (128, 128)  # of a matrix product's result, which one core computes


def seconds(operator: Operator, device: Device) -> float:
    """Return how long it takes where nothing else is at work.

    Computing takes as long as the slower of arithmetic and memory ("Roofline", Williams, Waterman and Patterson,
    CACM 52, 2009).
    """
    efficiency = device.efficiency
    if operator.kind.is_collective:
        return collective_seconds(operator, device)
    if operator.kind is Kind.transfer:
        return operator.num_bytes / device.host_bandwidth
    if operator.stream is Stream.host:
        return operator.num_bytes / device.host_memory_bandwidth
    memory = operator.num_bytes / (device.memory_bandwidth * efficiency.memory)
    if operator.kind is Kind.memory or not operator.flops:
        return memory
    reached = efficiency.attention if operator.kind is Kind.attention else efficiency.matmul
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
    all-reduce ("Bandwidth Optimal All-reduce Algorithms", Patarasu and Yuan, 2009)."""
    ranks = len(operator.group)
    if ranks <= 1:
        return 0.0
    passes = 2 if operator.kind is Kind.reduce else 1
    efficiency = device.efficiency
    bandwidth = device.link_bandwidth * efficiency.link
    nodes = len({rank // device.node_size for rank in operator.group})
    if nodes > 1:  # every ring crosses from node to node, and together they have the node's network
        bandwidth = min(bandwidth, device.network_bandwidth * efficiency.network)
    return passes * (operator.num_bytes * (ranks - 1) / ranks / bandwidth + device.latency_s * (ranks - 1))
