"""The memory of a compiled step, by what the allocators report: compiled code calls no operator for its buffers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from fsdp_lab.training.profile import Event, Profile
from fsdp_lab.training.torch_private import Change, allocator_changes

_FORWARD = "fsdp_lab: a forward pass begins"
# How PyTorch's profiler names what begins a phase.
_PHASES = {_FORWARD: "forward", "autograd::engine::evaluate_function": "backward", "Optimizer.": "optimizer"}


class AllocatorRecorder:
    """Records what the allocators report of a step.

    They do not report what an allocation is for, so each counts as `other`, outside of all modules.

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
        """Return the profile of the step, once it is over; of one that failed up to the failure."""
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
