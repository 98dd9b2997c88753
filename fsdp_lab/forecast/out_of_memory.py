"""Reads PyTorch's out-of-memory errors, and finds the failed allocation in a forecast. Imports no torch."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from fsdp_lab.config import SweepConfig, UserError
from fsdp_lab.config.axes.activation_offload import ActivationOffload
from fsdp_lab.config.axes.checkpointing import ActivationCheckpointing
from fsdp_lab.config.axes.offload import OffloadTarget
from fsdp_lab.config.axes.reshard import ReshardPolicy
from fsdp_lab.config.axes.sharding import Granularity
from fsdp_lab.forecast.allocator import LARGE_SEGMENT, MIN_BLOCK, SMALL_SEGMENT, segment_bytes
from fsdp_lab.memory.profile import Event, Profile

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = r"(\d+(?:\.\d+)? (?:bytes|[KMGT]iB))"
# Texts of PyTorch 0.4 to 2.0, and from 2.1 on; None: the value is missing.
_FORMS = {
    "asked": rf"Tried to allocate {_SIZE}",
    "capacity": rf"{_SIZE} total capacity|total capac?i?ty of {_SIZE}",
    "free": rf"{_SIZE} free[;)]|of which {_SIZE} is free",
    "allocated": rf"{_SIZE} already allocated|Of the allocated memory {_SIZE} is allocated by PyTorch",
    "reserved": rf"{_SIZE} reserved in total by PyTorch",
    "cached": rf"{_SIZE} cached|{_SIZE} is reserved by PyTorch but unallocated",
}
_BEGIN = r"out of memory\. Tried to allocate"
_END = r"cached\)|reserved in total by PyTorch|reserved by PyTorch but unallocated"
FIRST = "first step of the optimizer"  # a phase
WORKING = "forecasting "  # the progress line, which is no part of an explanation
_LONGEST = 450  # characters of a message, without the advice at its end


class Printed(NamedTuple):
    """A size as PyTorch prints it, to two decimals; bytes."""

    num_bytes: float
    error: float

    def may_be(self, num_bytes: int) -> bool:
        return abs(num_bytes - self.num_bytes) <= self.error


@dataclass(frozen=True)
class Shortage:
    """An allocation that failed.

    Attributes:
        asked: bytes; in a message those of the allocator's segment, in a snapshot those of the tensor.
        capacity: of the GPU; None, here and below: not known.
        free: of the GPU.
        allocated: by PyTorch, in tensors.
        cached: by PyTorch, reserved and in no tensor.
        others: bytes on the GPU outside of PyTorch.
        is_segment: whether `asked` is of a segment.
        largest: the sizes of the largest tensors; only in a snapshot.
    """

    asked: Printed
    capacity: float | None = None
    free: float | None = None
    allocated: float | None = None
    cached: float | None = None
    others: float | None = None
    is_segment: bool = True
    largest: tuple[int, ...] = ()

    @property
    def is_shared(self) -> bool:
        """Whether it is a segment that tensors below 10 MiB share: its size identifies none of them."""
        return self.is_segment and self.asked.num_bytes in (SMALL_SEGMENT, LARGE_SEGMENT)

    @property
    def pages_would_do(self) -> bool | None:
        """Whether free and cached memory together would suffice with expandable segments; None: not known."""
        if self.free is None or self.cached is None:
            return None
        return self.free + self.cached >= self.asked.num_bytes


def read_message(text: str) -> Shortage | None:
    """Return the last failed allocation in a log, by any version of PyTorch since 0.4; None: there is none."""
    begins = [match.start() for match in re.finditer(_BEGIN, text)]
    read = (_read(text[begin : begin + _LONGEST]) for begin in reversed(begins))
    return next((shortage for shortage in read if shortage is not None), None)


def _read(text: str) -> Shortage | None:
    whole = " ".join(text.split())  # a log may have wrapped it
    end = re.search(_END, whole)
    message = whole[: end.end()] if end else text.partition("\n")[0]
    sizes = {
        name: _printed(next(group for group in match.groups() if group))
        for name, form in _FORMS.items()
        if (match := re.search(form, message))
    }
    if "asked" not in sizes:
        return None
    capacity, free, allocated, cached, reserved = (
        sizes[name].num_bytes if name in sizes else None
        for name in ("capacity", "free", "allocated", "cached", "reserved")
    )
    if reserved is not None and allocated is not None:
        cached = reserved - allocated
    known = [one for one in (capacity, free, allocated, cached) if one is not None]
    others = known[0] - sum(known[1:]) if len(known) == 4 else None
    return Shortage(sizes["asked"], capacity, free, allocated, cached, others)


def _printed(text: str) -> Printed:
    number, unit = text.split()
    return Printed(float(number) * _UNITS[unit], 0.0 if unit == "bytes" else 0.0051 * _UNITS[unit])


class _Plain(pickle.Unpickler):
    """Unpickles only lists, dictionaries, numbers and text; rejects every other name before it is called."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}, and a snapshot has numbers and text only")


def read_snapshot(path: Path) -> Shortage:
    """Return the last failed allocation of a file that `torch.cuda.memory._dump_snapshot` wrote.

    Raises:
        UserError: it cannot be read, is no snapshot, or has no failed allocation.
    """
    try:
        with path.open("rb") as file:
            content = _Plain(file).load()
        failed = None
        for at, trace in enumerate(content["device_traces"]):
            for entry in trace:
                failed = (at, entry) if entry["action"] == "oom" else failed
        if failed is not None:
            return _of_snapshot([one for one in content["segments"] if one["device"] == failed[0]], failed[1])
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 (a damaged pickle may raise anything)
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise UserError(
            f"{path} is no snapshot of PyTorch's allocator ({why}); torch.cuda.memory._dump_snapshot writes one."
        ) from None
    raise UserError(f"{path} has no allocation that failed; record the history until the error, then write it.")


def _of_snapshot(segments: list[Any], failed: Any) -> Shortage:
    blocks = [block for segment in segments for block in segment["blocks"] if block["state"] == "active_allocated"]
    sizes = sorted((int(block.get("requested_size", block["size"])) for block in blocks), reverse=True)
    allocated, reserved = (sum(int(one[name]) for one in segments) for name in ("allocated_size", "total_size"))
    asked, free = int(failed["size"]), int(failed["device_free"])
    if min(asked, free, allocated, reserved - allocated, *sizes[-1:]) < 0:
        raise ValueError("a size is negative")
    return Shortage(
        Printed(asked, 0.0), None, free, allocated, reserved - allocated, is_segment=False, largest=tuple(sizes[:5])
    )


class Asking(NamedTuple):
    """A tensor of a forecast step with the size of the failed allocation.

    Attributes:
        held: category -> bytes on the device at that moment, including the tensor.
        alike: how many such tensors the step allocates.
    """

    event: Event
    held: dict[str, int]
    alike: int


def who_asked(profile: Profile, shortage: Shortage) -> Asking | None:
    """Return the tensor of a step that most likely failed, by its size; None: no tensor has that size.

    Of several, it is the one at which the step's memory is closest to what PyTorch held; if that is not known, the one
    with the most memory. The optimizer's first step allocates its states while gradients exist.
    """
    known, found = dict[int, int](), list[tuple[float, Event, dict[str, int]]]()
    for place, (event, (sums, _)) in enumerate(zip(profile.events, profile.states(), strict=True)):
        grows = event.num_bytes > known.get(event.storage, 0)
        known[event.storage] = event.num_bytes
        if event.place != "device" or not grows or (place < profile.begun and event.category != "optimizer"):
            continue
        size = -(-event.num_bytes // MIN_BLOCK) * MIN_BLOCK
        if shortage.asked.may_be(segment_bytes(size) if shortage.is_segment else size):
            held = {name: size for name, size in sums.items() if size}
            if place < profile.begun:
                event, held["grad"] = replace(event, phase=FIRST), held.get("param", 0)
            before = sum(held.values()) - event.num_bytes
            found.append((abs(before - shortage.allocated) if shortage.allocated is not None else -before, event, held))
    if not found:
        return None
    _, event, held = min(found, key=lambda one: one[0])
    return Asking(event, held, len(found))


def smaller_settings(config: SweepConfig, samples_per_worker: int) -> Iterator[list[str]]:
    """Yield overrides that need less memory and train the same, with one or two changes each.

    Args:
        samples_per_worker: in a step.
    """
    sharding, steps = config.sharding, config.training.grad_accum_steps
    single = {
        "sharding=per_block": sharding.granularity in (Granularity.ddp, Granularity.root),
        "reshard_after_forward=always": config.reshard_after_forward.policy is not ReshardPolicy.always,
        "activation_checkpointing=selective": config.activation_checkpointing is ActivationCheckpointing.none,
        "activation_checkpointing=full": config.activation_checkpointing is not ActivationCheckpointing.full,
        f"training.grad_accum_steps={2 * steps}": samples_per_worker % (2 * steps) == 0,
        "offload=cpu": config.offload.target is OffloadTarget.none,
        "activation_offload=cpu": config.activation_offload is ActivationOffload.none,
    }
    able = [change for change, helps in single.items() if helps]
    yield from ([change] for change in able)
    if not config.compile:
        yield ["compile=true"]
    if config.task.name == "language" and config.task.loss_chunks == 1:
        yield ["task.loss_chunks=8"]
    for place, first in enumerate(able):
        for second in able[place + 1 :]:
            if first.partition("=")[0] != second.partition("=")[0]:
                yield [first, second]
