"""The whole probe on each rank: what to measure, in which order, and when to stop."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fsdp_lab.config import UserError
from fsdp_lab.forecast.speed.device import Device, DeviceKind, KnownError
from fsdp_lab.forecast.speed.predict import step_seconds
from fsdp_lab.forecast.speed.program import Operator
from fsdp_lab.machine.hardware import cpu_name, host_memory
from fsdp_lab.probe.cases import attention_cases, memory_cases, product_cases, transfer_cases
from fsdp_lab.probe.collectives import Log, Sent, collective_cases, fit_links, measure_links, measure_overlap
from fsdp_lab.probe.figures import Measurement, blank
from fsdp_lab.probe.steps import COMPILES_S, Program, Step, checked_steps, launch_steps, programs, run_step
from fsdp_lab.probe.timer import Case, Timed, Timer
from fsdp_lab.training.distributed import DistributedContext, gather, largest

LIMIT_S = 90.0  # of a probe without `--steps`
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
    """Return the device that a probe starts from, and its data sheet; None: it has none.

    Args:
        sheet: returns the data sheet of a name.

    Raises:
        UserError: nodes differ in their number of ranks, or ranks in their device. Every rank raises it.
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
    here = torch.cuda.device_count() if over else begun.node_size  # ranks may use only some of them
    return replace(begun, node_size=max(local, here)), known


def measure(
    ranks: DistributedContext,
    begun: Device,
    known: Device | None,
    logs: Sequence[Log] = (),
    say: Callable[[str], None] = lambda what: None,
    limit_s: float = LIMIT_S,
    time_case: Callable[[Case], Timed] | None = None,
    time_step: Callable[[Step, int], Timed] = run_step,
) -> Measurement:
    """Measure this machine, on every rank. Each has its own figures; those of the first are written.

    Args:
        begun: the device before: its data sheet, or assumed figures.
        known: its data sheet; None: it has none.
        logs: of nccl-tests, the same on every rank; they replace timing collectives between ranks.
        say: called with the name of the next part.
        limit_s: seconds after which no new figure starts.
        time_case: a test gives both of these a device of known speed.
    """
    until, device = time.monotonic() + limit_s, ranks.device

    def is_late(needs_s: float) -> bool:  # all ranks stop together
        return bool(largest(float(time.monotonic() + needs_s > until)))

    sent = [one for log in logs for one in log.sent(begun.node_size)]
    measured = Measurement(begun, known, time_case or Timer(device).time, is_late)
    if device.type == "cpu":
        torch.set_num_threads(1)  # like a worker on a CPU
    say("small steps, as forecasts follow them")
    steps = launch_steps(device.type)
    followed = programs([*steps.values()], begun, ranks)
    say("matrix products")
    products = product_cases(device)
    measured.products(products)
    say("memory and attention")
    copies, eager, compiled = memory_cases(device)  # a copy reaches more than a step's operators
    peak = begun.memory_bandwidth if known else 1.0
    measured.rate("reached.memory" if known else "memory_bandwidth", copies, peak)
    measured.share("efficiency.memory", [eager])
    _attention(measured, device)
    if device.type == "cuda":
        say("transfers")
        for name, case in transfer_cases(device).items():
            measured.rate(name, case)
    _links(measured, ranks, sent, products, say)  # small steps wait for what they send
    for name, program, took in _run(measured, ranks, steps, followed, say, time_step):
        why = "the forecast of its step is as long without launches as the step that was measured"
        measured.fit([name], lambda on: step_seconds(program, on) / took.seconds, took.spread, why)  # noqa: B023
    measured.share("efficiency.fused", [compiled], COMPILES_S / 3)
    if measured.has("launch_s") and not measured.device.knows_host:
        measured.device = replace(measured.device, compiled_launch_s=measured.device.launch_s)
    return measured


def _attention(measured: Measurement, device: torch.device) -> None:
    cases = measured.attempt("attention", lambda: attention_cases(device)) or {}  # else the data sheet's figures stay
    if cases and "reached.cudnn_attention" not in cases:
        reached = replace(measured.device.reached, cudnn_attention=None)
        measured.device = replace(measured.device, reached=reached)
    for name, some in cases.items():
        measured.share(name, some)


def _run(
    measured: Measurement, ranks: DistributedContext, steps: dict[str, Step], followed: Sequence[Program],
    say: Callable[[str], None], time_step: Callable[[Step, int], Timed] = run_step,
) -> Iterator[tuple[str, list[Operator], Timed]]:  # fmt: skip
    """Run steps on every rank.

    The first rank gets name, operators and time of each step that ran and has a forecast.
    """
    for (name, step), program in zip(steps.items(), followed, strict=True):
        say(step.name)
        took = measured.attempt(name, partial(time_step, step, ranks.world_size), step.needs_s)
        if isinstance(program, str):
            measured.left[name] = program
        elif program and took:
            yield name, program, took


def _links(
    measured: Measurement, ranks: DistributedContext, logged: Sequence[Sent], products: dict[str, list[Case]],
    say: Callable[[str], None],
) -> None:  # fmt: skip
    """Measure collectives within a node, and between nodes if the ranks are on several."""
    for group in sorted({one.operator.group for one in logged}, key=len):  # links before networks
        fit_links(measured, [one for one in logged if one.operator.group == group])
    if logged:
        return
    world, local = ranks.world_size, int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size))
    if world == 1:
        measured.left["collectives"] = "one rank sends nothing: use torchrun --nproc-per-node N -m fsdp_lab.probe"
        return
    say("collectives")
    places = [rank // local * measured.device.node_size + rank % local for rank in range(world)]  # on whole nodes
    if 1 < local < world:
        groups: list[Any] = [dist.new_group([*range(at, at + local)]) for at in range(0, world, local)]  # on every rank
        measure_links(measured, collective_cases(ranks.device, places[:local], groups[ranks.rank // local]))
    measure_links(measured, collective_cases(ranks.device, places, None))
    if ranks.device.type == "cuda":
        measure_overlap(measured, products["bfloat16"][-1], ranks.device, places)


def check_steps(measured: Measurement, ranks: DistributedContext, say: Callable[[str], None]) -> list[Checked]:
    """Run the eight steps of `--steps`, and set the device's errors to theirs; empty except on the first rank."""
    steps = {step.name: step for step in checked_steps(ranks.device.type)}
    measured.is_late = lambda needs_s: False
    say(f"forecasts of {len(steps)} steps")
    followed = programs([*steps.values()], measured.device, ranks)
    checked = [Checked(name, step_seconds(program, measured.device), took.seconds)
               for name, program, took in _run(measured, ranks, steps, followed, say)]  # fmt: skip
    if errors := sorted(abs(one.error) for one in checked):
        middle, most = (min(max(error, 0.01), 0.9) for error in (median(errors), errors[int(0.9 * len(errors))]))
        known = KnownError(middle, most, sources=1)
        measured.device = replace(measured.device, errors=replace(measured.device.errors, probed=known))
    return checked
