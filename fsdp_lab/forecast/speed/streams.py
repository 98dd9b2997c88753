"""Schedules a step on the streams of a device: when each operator runs, and what it waits for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from fsdp_lab.forecast.speed.program import Kind, Operator, Stream, num_nodes

_COPIES_GRADIENTS = ("chunk_cat", "chunk_cat_mixed_dtype")  # into the input of a scatter


class Slot(NamedTuple):
    """When an operator runs, in seconds from the start of the step."""

    operator: Operator
    begin: float
    end: float


def schedule(
    program: Sequence[Operator],
    durations: Sequence[float],
    launch_s: float,
    separate_scatter: bool = False,
    synchronous: bool = False,
    node_size: int = 0,
    compiled_launch_s: float | None = None,
) -> list[Slot]:
    """Return when each operator runs: after its launch, its stream's previous operator, and its data dependencies.

    It waits for writes of what it reads and overwrites, and for reads of what it overwrites. Groups that cross between
    nodes take turns on the network. FSDP2 adds three rules:

    - Gathers and scatters of a process group share its communicator, unless `separate_scatter` is set.
    - In the forward pass a gather waits until the last but one has been copied out, to limit memory.
    - One scatter runs at a time. The next unit's gradients are copied in after it.

    Args:
        durations: seconds of each operator.
        launch_s: seconds that the host takes to issue an operator.
        separate_scatter: reductions have a communicator of their own.
        synchronous: the host waits for each operator, as on a CPU; a gloo thread sends DDP's reductions.
        node_size: devices of a node; 0: there is one node.
        compiled_launch_s: the same as `launch_s` for compiled code; None: `launch_s`.
    """
    free: dict[Stream, float] = defaultdict(float)
    written: dict[int, float] = defaultdict(float)
    last_read: dict[int, float] = defaultdict(float)
    communicators: dict[tuple[object, ...], float] = defaultdict(float)
    network: dict[tuple[int, ...], float] = {}
    copied_out: list[float] = []
    scattered = issued = 0.0
    slots = []
    compiled_s = launch_s if compiled_launch_s is None else compiled_launch_s
    for operator, duration in zip(program, durations, strict=True):
        issued += compiled_s if operator.compiled else launch_s
        stream, reads, writes = operator.stream, operator.reads, operator.writes
        waits = [issued, free[stream]]
        waits += [written[storage] for storage in (*reads, *writes)]
        waits += [last_read[storage] for storage in writes]
        communicator = (operator.group, separate_scatter and stream is Stream.scatter)
        if operator.kind.is_collective:
            waits.append(communicators[communicator])
        crosses = bool(node_size) and operator.kind.is_collective and num_nodes(operator.group, node_size) > 1
        if crosses:
            waits += [end for group, end in network.items() if group != operator.group]
        if operator.name.endswith(_COPIES_GRADIENTS) and stream is Stream.compute:
            waits.append(scattered)
        if stream is Stream.copy_in and operator.phase == "forward" and len(copied_out) > 1:
            waits.append(copied_out[-2])
        begin = max(waits)
        end = begin + duration
        if operator.kind.is_collective:
            communicators[communicator] = end
        if crosses:
            network[operator.group] = end
        if operator.kind is Kind.scatter and stream is Stream.scatter:
            scattered = end
        if operator.name.endswith("split_with_sizes_copy"):
            copied_out.append(end)
        if synchronous and not (operator.kind is Kind.reduce and operator.phase == "backward"):
            issued = end
        free[stream] = end
        for storage in reads:
            last_read[storage] = max(last_read[storage], end)
        for storage in writes:
            written[storage] = end
        slots.append(Slot(operator, begin, end))
    return slots
