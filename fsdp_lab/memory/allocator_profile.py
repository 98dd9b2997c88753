"""The memory of a compiled step, as the allocators report it: compiled code calls no operator for its buffers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.profiler import profile

from fsdp_lab.memory.profile import Event, Profile

_FORWARD = "fsdp_lab: a forward pass begins"
# The prefixes of the profiler's events that start a phase.
_PHASES = {_FORWARD: "forward", "autograd::engine::evaluate_function": "backward", "Optimizer.": "optimizer"}


_NOT_REPORTED = "fsdp_lab: not reported"


def not_reported() -> Any:
    """Return a context whose allocations `allocator_changes` leaves out."""
    return torch.profiler.record_function(_NOT_REPORTED)


class Change(NamedTuple):
    """An event of the profiler: an allocation, a free, or the start of a named range.

    Attributes:
        name: of the range; "" for memory.
        device: of the memory; None for a range.
        num_bytes: negative for a free.
    """

    name: str
    device: torch.device | None = None
    address: int = 0
    num_bytes: int = 0


@contextmanager
def allocator_changes(changes: list[Change]) -> Iterator[None]:
    """Append every allocation and free of this thread and of its backward passes, when the context ends.

    Those inside `not_reported` are left out.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it prints a line for each start and stop
    profiled: Any = profile(profile_memory=True)
    try:
        with profiled:
            yield
    finally:
        left, found = list(profiled.kineto_results.experimental_event_tree()), []
        while left:
            event = left.pop()
            left += () if event.name == _NOT_REPORTED else event.children
            kind, fields = event.typed
            if kind.name == "Allocation":
                found.append((event.start_time_ns, Change("", fields.device, fields.ptr, fields.alloc_size)))
            else:
                found.append((event.start_time_ns, Change(event.name)))
        changes += [change for _, change in sorted(found, key=lambda one: one[0])]


class AllocatorRecorder:
    """Records what the allocators report of a step.

    Allocators do not report the purpose of an allocation, so each counts as `other`, outside of all modules.

    Args:
        before: what existed before the step, by category.
        device: memory on it counts as `device`, all other as `host`.
    """

    def __init__(self, before: Profile, device: torch.device) -> None:
        self._before, self._device = before, device
        self._changes: list[Change] = []

    @contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        mark = model.register_forward_pre_hook(_mark_forward)
        try:
            with allocator_changes(self._changes):
                yield
        finally:
            mark.remove()

    def finish(self) -> Profile:
        """Return the profile of a step that has ended; of a failed step, the profile up to the failure."""
        begun = self._before.begun
        return Profile([*self._before.events[:begun], *self._events()], begun).with_peaks()

    def _events(self) -> Iterator[Event]:
        numbers: dict[tuple[str, int], int] = {}
        phase = "forward"
        for number, change in enumerate(self._changes):
            if change.device is None:
                phase = next((after for name, after in _PHASES.items() if change.name.startswith(name)), phase)
                continue
            key, freed = (str(change.device), change.address), change.num_bytes < 0
            storage = numbers.pop(key, None) if freed else numbers.setdefault(key, -1 - number)
            if storage is not None:
                place = "device" if change.device == self._device else "host"
                yield Event(storage, place, "other", 0 if freed else change.num_bytes, "", phase)


def _mark_forward(*_: object) -> None:
    with torch.profiler.record_function(_FORWARD):
        pass
