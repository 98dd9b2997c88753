"""A step on the streams of a device: what runs when, and what waits for what."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_lab.speed.program import Kind, Operator, Stream

_COPIES_GRADIENTS = ("chunk_cat", "chunk_cat_mixed_dtype")  # into what a scatter sends


@dataclass(frozen=True)
class Slot:
    """When an operator runs, in seconds from the beginning of the step."""

    operator: Operator
    begin: float
    end: float


@dataclass(frozen=True)
class Schedule:
    """A step. `issued`: when its last operator was issued by the host."""

    slots: Sequence[Slot]
    issued: float

    @property
    def seconds(self) -> float:
        return max((slot.end for slot in self.slots), default=0.0)

    def busy(self) -> dict[Stream, float]:
        """Return the seconds that each stream is at work."""
        total: dict[Stream, float] = defaultdict(float)
        for slot in self.slots:
            total[slot.operator.stream] += slot.end - slot.begin
        return dict(total)


def schedule(
    program: Sequence[Operator],
    durations: Sequence[float],
    launches: Sequence[float],
    separate_scatter: bool = False,
    synchronous: bool = False,
) -> Schedule:
    """Return when each operator runs: after the host has issued it, after the one before it on its stream, and after
    what it reads has been written and what it overwrites has been read.

    FSDP2 adds three rules: gathers and scatters of a process group share its communicator, unless it is told otherwise;
    a gather waits until the one before the last has been copied out in the forward pass, for their memory; one scatter
    is under way at a time, and the copying of the next unit's gradients into its buffer waits for it.

    Args:
        durations: seconds of each operator.
        launches: seconds that the host takes to issue each operator.
        separate_scatter: reductions have a communicator of their own.
        synchronous: the host waits for each operator, as on a CPU; DDP's reductions are sent by a thread of gloo's.
    """
    free: dict[Stream, float] = defaultdict(float)
    written: dict[int, float] = {}
    last_read: dict[int, float] = {}
    communicators: dict[tuple[object, ...], float] = defaultdict(float)
    scattered = [0.0]
    copied_out: list[float] = []
    issued = 0.0
    slots = []
    for operator, duration, launch_s in zip(program, durations, launches, strict=True):
        issued += launch_s
        stream, reads, writes = operator.stream, operator.reads, operator.writes
        waits = [issued, free[stream]]
        waits += [written[storage] for storage in reads if storage in written]
        waits += [written[storage] for storage in writes if storage in written]
        waits += [last_read[storage] for storage in writes if storage in last_read]
        communicator = (operator.group, separate_scatter and stream is Stream.scatter)
        if operator.kind.is_collective:
            waits.append(communicators[communicator])
        if operator.name.endswith(_COPIES_GRADIENTS) and stream is Stream.compute:
            waits.append(scattered[-1])
        if stream is Stream.copy_in and operator.phase == "forward" and len(copied_out) > 1:
            waits.append(copied_out[-2])
        begin = max(waits)
        end = begin + duration
        if operator.kind.is_collective:
            communicators[communicator] = end
        if operator.kind is Kind.scatter:
            scattered.append(end)
        if operator.name.endswith("split_with_sizes_copy"):
            copied_out.append(end)
        if synchronous and not (operator.kind is Kind.reduce and operator.phase == "backward"):
            issued = end
        free[stream] = end
        for storage in reads:
            last_read[storage] = max(last_read.get(storage, 0.0), end)
        for storage in writes:
            written[storage] = end
        slots.append(Slot(operator, begin, end))
    return Schedule(slots, issued)
