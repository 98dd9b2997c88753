"""The whole probe on each rank: what is measured, in which order, and until when."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend

from fsdp_lab.config import UserError
from fsdp_lab.forecast.speed.device import Device, DeviceKind, KnownError
from fsdp_lab.forecast.speed.predict import step_seconds
from fsdp_lab.machine.hardware import cpu_name, host_memory
from fsdp_lab.probe.cases import attention_cases, memory_cases, prefers_cudnn, product_cases, transfer_cases
from fsdp_lab.probe.collectives import Log, Sent, collective_cases, fit_links, measure_links, measure_overlap
from fsdp_lab.probe.figures import Measurement, blank
from fsdp_lab.probe.steps import Program, Step, checked_steps, launch_steps, programs, run_step
from fsdp_lab.probe.timer import Case, Timed, Timer
from fsdp_lab.training.distributed import DistributedContext, gather, largest

LIMIT_S = 90.0  # of a probe without `--steps`
_COMPILES_S = {"compiled": 40.0, "eager": 0.0}  # what compiling a small step may take
_GIB = 2**30


class Checked(NamedTuple):
    """A step of `--steps`, forecast and measured."""

    name: str
    forecast_s: float
    measured_s: float

    @property
    def error(self) -> float:
        return self.forecast_s / self.measured_s - 1


def device_here(ranks: DistributedContext, sheet: Callable[[str], Device | None]) -> tuple[Device, Device | None]:
    """Return the device that a probe begins with, and its data sheet; None: it has none.

    Args:
        sheet: returns the data sheet of a name.

    Raises:
        UserError: nodes differ in their number of ranks, or ranks in their device; on every rank.
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size))
    if len(kinds := {*gather((local, ranks.device_name))}) > 1:
        told = ", ".join(f"{count} rank(s) on a node with {name}" for count, name in sorted(kinds))
        raise UserError(
            f"a probe measures nodes that are alike, and these are not: {told}; start as many ranks on each node, on "
            "devices of one kind."
        )
    over = ranks.world_size > local  # nodes
    if ranks.device.type == "cpu":
        memory, known = host_memory() / max(local, 2) / _GIB, sheet(cpu_name())
        return known or blank(cpu_name(), DeviceKind.cpu, memory, 1, local if over else 4096), known
    gpu = torch.cuda.get_device_properties(ranks.device)
    known = sheet(gpu.name)
    memory, cores = gpu.total_memory / _GIB, gpu.multi_processor_count
    begun = known or blank(gpu.name, DeviceKind.cuda, memory, cores, torch.cuda.device_count())
    return replace(begun, node_size=local if over else max(local, begun.node_size)), known


def measure(
    ranks: DistributedContext,
    begun: Device,
    known: Device | None,
    logs: Sequence[Log] = (),
    say: Callable[[str], None] = lambda what: None,
    limit_s: float = LIMIT_S,
    time_case: Callable[[Case], Timed] | None = None,
    time_step: Callable[[Step, int, Program], Timed] = run_step,
) -> Measurement:
    """Measure this machine, on every rank. Each has its own figures; those of the first are written.

    Args:
        begun: what the device is before: its data sheet, or assumed.
        known: its data sheet; None: it has none.
        logs: of nccl-tests, the same on every rank: they stand for collectives between ranks.
        say: called with what is measured next.
        limit_s: after which nothing further is measured.
        time_case: a test gives both of these a device of known speed.
    """
    until, device = time.monotonic() + limit_s, ranks.device

    def is_late(needs_s: float) -> bool:  # all ranks stop together
        return bool(largest(float(time.monotonic() + needs_s > until)))

    sent = [one for log in logs for one in log.sent(begun.node_size)]
    measured = Measurement(begun, known, time_case or Timer(device).time, is_late)
    if device.type == "cpu":
        torch.set_num_threads(1)  # as a worker on a CPU has
    say("small steps, as forecasts follow them")
    steps = launch_steps(device.type)
    followed = programs([*steps.values()], begun, ranks)
    say("matrix products")
    products = product_cases(device)
    measured.products(products)
    say("memory and attention")
    memory = memory_cases(device)
    whole = replace(measured.device.efficiency, memory=1.0)  # a copy reaches more than operators of a step do
    measured.share("reached.memory" if known else "memory_bandwidth", memory["copies"], efficiency=whole)
    measured.share("efficiency.memory", memory["eager"])
    _attention(measured, device)
    if device.type == "cuda":
        say("transfers")
        _transfers(measured, device)
    _links(measured, ranks, sent, products, say)  # small steps wait for what they send
    for (name, step), program in zip(steps.items(), followed, strict=True):
        say(f"launches of {step.name} code")
        run = partial(time_step, step, ranks.world_size, program)
        measured.launches(name, program, run, _COMPILES_S[step.name])
    measured.share("efficiency.fused", memory["compiled"], _COMPILES_S["compiled"] / 3)
    if measured.has("launch_s") and not measured.device.knows_host:
        measured.device = replace(measured.device, compiled_launch_s=measured.device.launch_s)
    return measured


def _attention(measured: Measurement, device: torch.device) -> None:
    cudnn = False
    if device.type == "cuda":
        found = measured.attempt("attention", lambda: prefers_cudnn(device))
        if found is None:  # what the data sheet has stays
            return
        cudnn, before = found, measured.device.reached
        share = (before.cudnn_attention or before.attention) if cudnn else None
        measured.device = replace(measured.device, reached=replace(before, cudnn_attention=share))
    if cudnn:
        measured.share("reached.cudnn_attention", attention_cases(device, None))
    measured.share("reached.attention", attention_cases(device, SDPBackend.FLASH_ATTENTION if cudnn else None))


def _transfers(measured: Measurement, device: torch.device) -> None:
    cases = transfer_cases(device)
    measured.share("host_bandwidth", cases["pinned"])
    measured.device = replace(measured.device, pageable_bandwidth=measured.device.host_bandwidth)
    measured.share("pageable_bandwidth", cases["pageable"])
    if not measured.has("pageable_bandwidth"):
        measured.device = replace(measured.device, pageable_bandwidth=None)
    measured.share("host_memory_bandwidth", cases["host"])


def _links(
    measured: Measurement, ranks: DistributedContext, logged: Sequence[Sent], products: dict[str, list[Case]],
    say: Callable[[str], None],
) -> None:  # fmt: skip
    """Measure collectives within a node, and between nodes where the ranks are on several."""
    for group in sorted({one.operator.group for one in logged}, key=len):  # links before networks
        fit_links(measured, [one for one in logged if one.operator.group == group])
    if logged:
        return
    world, local = ranks.world_size, int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size))
    if world == 1:
        measured.left["collectives"] = "one rank sends nothing: use torchrun --nproc-per-node N -m fsdp_lab.probe"
        return
    say("collectives")
    nodes = [range(first, first + local) for first in range(0, world, local)] if 1 < local < world else []
    groups: list[Any] = [dist.new_group([*node]) for node in nodes]  # every rank makes all
    if nodes:
        own = ranks.rank // local
        measure_links(measured, collective_cases(ranks.device, [*range(local)], groups[own]))
    measure_links(measured, collective_cases(ranks.device, [*range(world)], None))
    if ranks.device.type == "cuda":
        measure_overlap(measured, products["bfloat16"][-1], ranks.device, [*range(world)])


def check_steps(measured: Measurement, ranks: DistributedContext, say: Callable[[str], None]) -> list[Checked]:
    """Run the eight steps of `--steps`, and let their errors be those of this device; empty on other ranks."""
    steps, checked = checked_steps(ranks.device.type), list[Checked]()
    measured.is_late = lambda needs_s: False
    say(f"forecasts of {len(steps)} steps")
    followed = programs(steps, measured.device, ranks)
    for step, program in zip(steps, followed, strict=True):
        say(step.name)
        timed = measured.attempt(step.name, partial(run_step, step, ranks.world_size, program))
        if isinstance(program, str):
            measured.left[step.name] = program
        elif program and timed:
            checked.append(Checked(step.name, step_seconds(program, measured.device), timed.seconds))
    if errors := sorted(abs(one.error) for one in checked):
        middle, most = (min(max(error, 0.01), 0.9) for error in (median(errors), errors[int(0.9 * len(errors))]))
        known = KnownError(middle, most, sources=1)
        measured.device = replace(measured.device, errors=replace(measured.device.errors, probed=known))
    return checked
