"""Devices, operators, trials and forecasts made by hand, of round figures."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fsdp_lab.config.options import device_file
from fsdp_lab.forecast.capacity import Forecast
from fsdp_lab.forecast.speed.device import (
    Basis,
    Device,
    DeviceKind,
    Efficiency,
    Errors,
    Factors,
    KnownError,
    Reached,
    load_device,
)
from fsdp_lab.forecast.speed.predict import BOUNDS, Parts, Speed
from fsdp_lab.forecast.speed.program import Kind, Operator, Stream
from fsdp_lab.forecast.speed.refine import Observation
from fsdp_lab.forecast.table import Row

ROUND = Device(
    name="round", kind=DeviceKind.cuda, basis=Basis.data_sheet,
    memory_gib=80, peak_flops={"float8_e4m3fn": 2e14, "bfloat16": 1e14, "float32": 1e13}, memory_bandwidth=1e12,
    num_cores=100, link_bandwidth=1e11, node_size=8, network_bandwidth=4e10, host_bandwidth=1e10,
    host_memory_bandwidth=2e10, launch_s=0.0, latency_s=0.0, link_latency_s=0.0, network_latency_s=0.0,
    reached=Reached(),
    efficiency=Efficiency(
        matmul=0.5, float8=0.4, attention=0.25, memory=0.5, fused=0.8, link=1.0, network=1.0, overlap=1.0
    ),
    errors=Errors(KnownError(0.1, 0.2)),
)  # fmt: skip


def sheet(name: str = "a100_80gb") -> Device:
    file = device_file(name)
    assert file is not None
    return load_device(file)


def operator(kind: Kind, **facts: object) -> Operator:
    return Operator("one", kind, Stream.compute, "forward", "", **facts)  # type: ignore[arg-type]


def gather(num_bytes: float, ranks: int, kind: Kind = Kind.gather) -> Operator:
    return operator(kind, num_bytes=num_bytes, group=tuple(range(ranks)))


def observations(count: int, factors: Factors, spread: float = 0.0) -> list[Observation]:
    """Return trials that took what the parts of their predictions take, times `factors` and some noise."""
    draw = random.Random(0)
    collected = []
    for number in range(count):
        parts = Parts(draw.uniform(0.1, 1), draw.uniform(0, 1), 0.01, draw.uniform(0, 0.5))
        worked = factors.compute * (parts.compute + parts.host) + factors.communication * parts.communication
        seconds = worked + (1 - factors.overlap) * parts.hidden
        noise = 1 + draw.uniform(-spread, spread)
        collected.append(Observation(str(number), parts, seconds * noise, "2.15.0", "d", "one", 0.0))
    return collected


CONTEXT = 100  # bytes, of what may fit or fits
PEAK = 700
NEEDS = {"yes": 900, "unsure": 1001, "no": 1001}
ACTIVE = {"yes": 750, "unsure": 900, "no": 901}


def speed_of(step_s: float, error: float = 0.1, **changed: object) -> Speed:
    """Return a step that nothing bounds in particular, in the group of one model; `error` is a share."""
    speed = Speed(
        step_s, dict.fromkeys(BOUNDS, 0.2), step_s / (1 + error), step_s / (1 - error), error, Basis.fitted, "X",
        samples=100, group="one model",
    )  # fmt: skip
    return replace(speed, **changed)  # type: ignore[arg-type]


def row(setting: str, step_s: float, peak: int = 100, fits: bool = True, **changed: object) -> Row:
    """Return a setting that needs `peak` bytes, of 1,000 or, if it does not fit, of 50."""
    peaks, speed = {"device": {"total": peak}}, speed_of(step_s, **changed)  # type: ignore[arg-type]
    return Row([setting], Forecast(True, 8, peaks, capacity_bytes=1000 if fits else 50, data_sheet="X", speed=speed))


def forecast_of(verdict: str, step_s: float = 1.0, capacity: int | None = 1000) -> Forecast:
    """Return one whose allocator caches: it fits ("yes"), or without what is cached ("unsure"), or does not ("no")."""
    reserved = NEEDS[verdict] - CONTEXT
    allowances = {"CUDA context": CONTEXT, "fragmentation": reserved - PEAK}
    return Forecast(
        True, 8, {"device": {"total": PEAK}}, allowances, {}, capacity, None, ACTIVE[verdict], reserved_bytes=reserved,
        speed=speed_of(step_s),
    )  # fmt: skip


def kept(run: Callable[[], object]) -> list[Tensor]:
    """Return what autograd keeps for the backward pass of what runs."""
    tensors: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run()
    return tensors


def num_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of their storages, each once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
