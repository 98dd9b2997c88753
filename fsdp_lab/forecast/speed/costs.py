"""Seconds of one operator on one device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from fsdp_lab.forecast.speed.device import Device, DeviceKind, Reached
from fsdp_lab.forecast.speed.program import FUSED, Kind, Operator, Stream, num_nodes

_TILE = (128, 128)  # of a matrix product's result, which one core computes
# The rate of attention backward relative to forward. FlashAttention: 25-35 % and 30-50 % of the peak
# ("FlashAttention-2", Dao, 2023, section 1). cuDNN: 518 and 600 TFLOP/s with heads of 128 and 8,192 tokens
# ("FlashAttention-3", Shah et al., 2024, figures 5 and 6).
_BACKWARD, _CUDNN_BACKWARD = 0.75, 0.86
# The share of the peak that products in float32 reach, which run outside of the tensor cores: a step of ViT on an H200
# (experiments/gpu).
_FLOAT32 = 0.95
_HALVES = ("bfloat16", "float16")
# The share of the network that an all-reduce reaches, relative to gathers and scatters: 340 and 200 GB/s between 32
# nodes with 8 H100s each (github.com/NVIDIA/nccl, issue 1218).
_ALL_REDUCE = 1.7
# The share of the network that gathers reach falls with the number of adapters. One adapter of 200 Gbit/s: 24 of 25
# GB/s (github.com/NVIDIA/nccl-tests, issue 119). Eight of 100 Gbit/s: three quarters (NVIDIA/nccl, issue 495). Eight of
# 400 Gbit/s: 216 of 400 GB/s (NVIDIA/nccl, issue 2409). The three shares are linear in the logarithm of the bandwidth.
_ONE_ADAPTER, _GBIT, _LESS_BY_DOUBLING = 0.96, 200.0, 0.105
# The share of a node's links that a collective reaches while nothing else runs. NCCL assumes 20.0 of 25 GB/s per link
# on A100s, 20.6 of 25 on H100s, and 40.1 of 50 on B200s (`src/graph/topo.h`).
ALONE = 0.8


class _Path(NamedTuple):
    """An algorithm and protocol: factors of latencies and bandwidth, relative to a ring with "simple"."""

    begin: float = 1.0
    link: float = 1.0
    network: float = 1.0
    bandwidth: float = 1.0


# NCCL's protocols "simple", "LL" and, within a node, "LL128": `src/graph/tuning.cc`, of which PyTorch has a copy in
# `torch._inductor.comm_analysis`. gloo has one.
_PLAIN, _LL, _LL128 = _Path(), _Path(6.6 / 8.4, 0.6 / 3.4, 2.7 / 14, 1 / 2), _Path(14 / 8.4, 1.9 / 3.4, 1, 120 / 128)
_TREES = (_Path(1, 4 / 3.4, 1, 0.92), _Path(6.8 / 8.4, 0.6 / 3.4, 5 / 14, 1 / 3.8))


def in_tf32(program: Sequence[Operator], device: Device, products: bool) -> list[Operator]:
    """Return the program with the float32 products that a GPU computes in TF32.

    Convolutions use TF32 by PyTorch's default, if the GPU has it. Fused attention does not: CUTLASS's kernel replaces
    each float32 product by three TF32 products, whatever the setting.

    Args:
        products: matrix products use TF32, too.
    """

    def is_in_tf32(operator: Operator) -> bool:
        if device.kind is DeviceKind.cpu or operator.kind is not Kind.matmul or operator.dtype != "float32":
            return False
        return products or ("convolution" in operator.name and "tfloat32" in device.peak_flops)

    return [replace(operator, dtype="tfloat32") if is_in_tf32(operator) else operator for operator in program]


def seconds(operator: Operator, device: Device) -> float:
    """Return the seconds of an operator while nothing else runs.

    Raises:
        ConfigError: the device's file has no figures for the operator's dtype.
    """
    return (collective_seconds if operator.kind.is_collective else _work_seconds)(operator, device)


def _work_seconds(operator: Operator, device: Device) -> float:
    """Return the seconds of everything but a collective.

    Computing takes as long as the slower of arithmetic and memory ("Roofline", Williams, Waterman and Patterson, CACM
    52, 2009).
    """
    if device.kind is DeviceKind.cpu and operator.dtype in _HALVES and operator.kind is not Kind.matmul:
        operator = replace(operator, dtype="float32", num_bytes=2 * operator.num_bytes)  # computed in float32
    efficiency, most = device.efficiency, device.reached
    if operator.kind is Kind.transfer:
        return operator.num_bytes / device.host_bandwidth
    if operator.stream is Stream.host:
        return operator.num_bytes / device.host_memory_bandwidth
    share = efficiency.fused if operator.name == FUSED else efficiency.memory
    memory = operator.num_bytes / (device.memory_bandwidth * most.memory * share)
    if operator.kind is Kind.memory or not operator.flops:
        return memory
    if operator.kind is Kind.attention:
        reached = _attention_reaches(operator, most) * efficiency.attention
    else:
        reached = _product_reaches(operator, device)
    if operator.shape is not None and operator.kind is Kind.matmul and device.kind is DeviceKind.cuda:
        reached *= occupied(operator.shape, device.num_cores)
    return max(operator.flops / (device.peak(operator.dtype) * reached), memory)


def _product_reaches(operator: Operator, device: Device) -> float:
    """Return the share of the peak that a product reaches, without idle cores of its last tiles."""
    dtype, efficiency = operator.dtype, device.efficiency
    if device.product_shares and dtype in device.product_shares:
        return device.product_shares[dtype] * efficiency.matmul
    if dtype == "float32" and device.kind is DeviceKind.cuda:
        return _FLOAT32
    return device.reached.matmul * (efficiency.float8 if dtype.startswith("float8") else efficiency.matmul)


def _attention_reaches(operator: Operator, most: Reached) -> float:
    """Return the share of the peak that a microbenchmark of the operator's kernel reaches.

    Since its builds with cuDNN 9.15.1, PyTorch prefers cuDNN's attention on Hopper and Blackwell (sm90, sm100).
    """
    backward = operator.name.endswith("_backward")
    if most.cudnn_attention is not None and "flash" in operator.name and operator.dtype in _HALVES:
        return most.cudnn_attention * (_CUDNN_BACKWARD if backward else 1.0)
    return most.attention * (_BACKWARD if backward else 1.0)


def occupied(shape: tuple[int, int, int, int], num_cores: int) -> float:
    """Return the share of the cores' time that a matrix product uses.

    Its tiles run in waves, the last of which is rarely full ("Matrix Multiplication Background User's Guide", NVIDIA,
    sections on tile and wave quantization).

    Args:
        shape: (batch, rows, columns, inner size).
    """
    batch, rows, columns, _ = shape
    if not batch * rows * columns:
        return 1.0
    tiles = batch * math.ceil(rows / _TILE[0]) * math.ceil(columns / _TILE[1])
    exact = batch * rows * columns / (_TILE[0] * _TILE[1])
    return exact / (math.ceil(tiles / num_cores) * num_cores)


def collective_seconds(operator: Operator, device: Device) -> float:
    """Return the seconds of a collective: NCCL takes the fastest of its algorithms and protocols.

    A ring sends `n - 1` of its `n` parts over each link, twice for an all-reduce ("Bandwidth Optimal All-reduce
    Algorithms", Patarasu and Yuan, 2009). An all-reduce between nodes can also use a tree, with fewer steps.
    """
    ranks = len(operator.group)
    if ranks <= 1:
        return 0.0
    nodes = num_nodes(operator.group, device.node_size)
    passes = 2 if operator.kind is Kind.reduce else 1
    sending = passes * operator.num_bytes * (ranks - 1) / ranks / _bandwidth(operator, device, nodes)
    between = nodes - 1

    def along(path: _Path, within: float, between: float) -> float:
        steps = within * path.link * device.link_latency_s + between * path.network * device.network_latency_s
        return path.begin * device.latency_s + passes * steps + sending / path.bandwidth

    nccl = device.kind is DeviceKind.cuda
    rings = [_PLAIN, *([_LL] if nccl else []), *([_LL128] if nccl and nodes == 1 else [])]
    paths = [along(path, ranks - 1 - between, between) for path in rings]
    if operator.kind is Kind.reduce and nodes > 1 and nccl:
        paths += [along(path, ranks / nodes - 1, math.log2(nodes)) for path in _TREES]
    return min(paths)


def network_alone(device: Device) -> float:
    """Return the share of the network between nodes that a microbenchmark of gathers reaches."""
    if device.kind is DeviceKind.cpu:
        return 1.0
    doublings = max(0.0, math.log2(device.network_gbit / _GBIT))
    return max(_ONE_ADAPTER - _LESS_BY_DOUBLING * doublings, _LESS_BY_DOUBLING)


def gathers_at(device: Device) -> float:
    """Return the share of the network between nodes that gathers and scatters reach."""
    return min(1.0, network_alone(device) * device.efficiency.network)


def reduces_at(device: Device) -> float:
    """Return the share of the network between nodes that an all-reduce reaches."""
    return min(1.0, _ALL_REDUCE * gathers_at(device))


def _bandwidth(operator: Operator, device: Device, nodes: int) -> float:
    """Return the bytes/s of a group.

    Tensor-parallel layers wait for what they send, so it has the links to itself. The rings of a group use a node's
    network together. They share it with the groups of the node's other devices, which send at the same time.
    """
    within = device.link_bandwidth * (ALONE if operator.stream is Stream.layers else device.efficiency.link)
    if nodes == 1:
        return within
    share = min(1.0, len(operator.group) / nodes / device.node_size)
    reached = reduces_at(device) if operator.kind is Kind.reduce else gathers_at(device)
    return min(within, device.network_bandwidth * reached * share)
