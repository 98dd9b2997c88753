"""The memory that CUDA's caching allocator reserves for a step, derived from the requests, without a GPU.

The rules are those of PyTorch's `CUDACachingAllocator.cpp` with its default settings; the sizes are those of
`c10/core/AllocatorConfig.h`, which `tests/forecast/test_fake.py` reads. Reserved memory is what runs out. A freed block
returns to the allocator, not to the device, and only the stream that allocated it can reuse it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from fsdp_lab.machine.hardware import allocator_settings
from fsdp_lab.memory.profile import Profile

MIN_BLOCK = 512  # every request is rounded up to a multiple of it
SMALL_SIZE = 2**20  # the largest request that shares segments of `SMALL_SEGMENT`
SMALL_SEGMENT = 2 * 2**20
LARGE_SEGMENT = 20 * 2**20  # shared by requests below `MIN_OWN_SEGMENT`
MIN_OWN_SEGMENT = 10 * 2**20
ROUND_LARGE = 2 * 2**20

# FSDP2 allocates these on its own streams, and all else on the compute stream.
STREAMS = {"all_gather": "all-gather copy-in", "grad": "reduce-scatter"}
# Until pytorch#129721 (June 2024) that included the input of reduce-scatter, which the compute stream could not reuse.
# FSDP1 allocates what it gathers and reduces on its own streams, without copies.
FLAT_STREAMS = {"unsharded_param": "unshard", "all_gather": "cast", "grad": "reduce", "reduce_scatter": "reduce"}
_FREED_LATE = 2  # units of FSDP1: the host waits for the last but one, whose memory is then free
STREAMS_BEFORE_129721 = {**STREAMS, "reduce_scatter": "reduce-scatter"}


def expands() -> bool:
    """Return whether the environment asks PyTorch for `expandable_segments:True`."""
    options = [option.partition(":") for option in allocator_settings().replace(" ", "").split(",")]
    return ("expandable_segments", ":", "True") in options


def segment_bytes(num_bytes: int) -> int:
    """Return the size of the segment that a request takes from the device if no free block is large enough."""
    if num_bytes <= SMALL_SIZE:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if num_bytes < MIN_OWN_SEGMENT else -(-num_bytes // ROUND_LARGE) * ROUND_LARGE


@dataclass(eq=False)
class _Block:
    """A part of a segment; `before` and `after` are its neighbours in it."""

    size: int
    pool: tuple[str, bool]  # stream, and whether it is of the small ones
    address: int
    before: _Block | None = None
    after: _Block | None = None
    free: bool = False


class CachingAllocator:
    """Reserves segments, and cuts and merges the blocks in them.

    `requested`, `active` and `reserved` are the bytes now, `peak_active` and `peak_reserved` the most so far, as in
    `torch.cuda.memory_stats`.

    Args:
        expandable: as with `expandable_segments:True`: each pool has one segment, which grows by pages.
    """

    def __init__(self, expandable: bool = False) -> None:
        self._expandable = expandable
        self._tails: dict[tuple[str, bool], _Block] = {}  # of expandable segments
        self.requested = self.active = self.reserved = 0
        self.peak_active = self.peak_reserved = 0
        self._blocks: dict[Hashable, tuple[_Block, int]] = {}
        self._free: dict[tuple[str, bool], list[tuple[int, int, _Block]]] = defaultdict(list)
        self._end = 0  # of the last segment: addresses only tell blocks of one size apart

    def allocate(self, key: Hashable, num_bytes: int, stream: str = "") -> None:
        """Take `num_bytes` (more than 0) for `key` on a stream."""
        size = max(MIN_BLOCK, -(-num_bytes // MIN_BLOCK) * MIN_BLOCK)
        block = self._find(size, (stream, size <= SMALL_SIZE)) or self._reserve(size, stream)
        left = block.size - size
        if left >= MIN_BLOCK if block.pool[1] or self._expandable else left > SMALL_SIZE:
            rest = _Block(left, block.pool, block.address + size, block, block.after)
            if block.after is not None:
                block.after.before = rest
            elif self._expandable:
                self._tails[block.pool] = rest
            block.after, block.size = rest, size
            self._put(rest)
        block.free = False
        self._blocks[key] = block, num_bytes
        self.requested += num_bytes
        self.active += block.size
        self.peak_active = max(self.peak_active, self.active)

    def free(self, key: Hashable) -> None:
        block, num_bytes = self._blocks.pop(key)
        self.requested -= num_bytes
        self.active -= block.size
        before, after = block.before, block.after
        if before is not None and before.free:
            self._take(before)
            block = self._merged(before, block)
        if after is not None and after.free:
            self._take(after)
            block = self._merged(block, after)
        self._put(block)

    def _find(self, size: int, pool: tuple[str, bool]) -> _Block | None:
        """Return the smallest free block that is large enough; of equals the one with the lowest address."""
        blocks = self._free[pool]
        index = bisect_left(blocks, size, key=lambda entry: entry[0])
        if index + 1 < len(blocks) and blocks[index][2] is self._tails.get(pool):
            index += 1  # the end of a segment, which can grow, comes last
        return blocks.pop(index)[2] if index < len(blocks) else None

    def _reserve(self, size: int, stream: str) -> _Block:
        if self._expandable:
            return self._extend(size, (stream, size <= SMALL_SIZE))
        segment = segment_bytes(size)
        block = _Block(segment, (stream, size <= SMALL_SIZE), self._end)
        self._end += segment
        self._grow(segment)
        return block

    def _extend(self, size: int, pool: tuple[str, bool]) -> _Block:
        page = SMALL_SEGMENT if pool[1] else LARGE_SEGMENT
        tail = self._tails.get(pool)
        if tail is not None and tail.free:
            self._take(tail)
            block, there = tail, tail.size
        else:
            block, there = _Block(0, pool, tail.address + tail.size if tail else 0, before=tail), 0
            if tail is not None:
                tail.after = block
        more = -(-(size - there) // page) * page
        block.size += more
        self._tails[pool] = block
        self._grow(more)
        return block

    def _grow(self, num_bytes: int) -> None:
        self.reserved += num_bytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _put(self, block: _Block) -> None:
        block.free = True
        insort(self._free[block.pool], (block.size, block.address, block), key=lambda entry: entry[:2])

    def _take(self, block: _Block) -> None:
        blocks = self._free[block.pool]
        index = bisect_left(blocks, (block.size, block.address), key=lambda entry: entry[:2])
        assert blocks[index][2] is block
        blocks.pop(index)

    def _merged(self, left: _Block, right: _Block) -> _Block:
        if self._tails.get(right.pool) is right:
            self._tails[right.pool] = left
        left.size += right.size
        left.after = right.after
        if right.after is not None:
            right.after.before = left
        return left


class Peaks(NamedTuple):
    """Peak bytes of a process.

    Attributes:
        active: the most in blocks that are in use; the allocator can return all others to the device.
        reserved: the most that the allocator takes from the device if it returns nothing.
    """

    active: int
    reserved: int


def allocator_peaks(
    profile: Profile, sharded: bool, workspaces: Collection[int] = (), streams: Mapping[str, str] = STREAMS,
    expandable: bool | None = None, flat: bool = False,
) -> Peaks:  # fmt: skip
    """Return the peak bytes of a process that repeats the profile's step.

    The first step starts without optimizer state, and allocates it at its end in the memory that the step has freed. So
    the step is replayed twice.

    Args:
        sharded: by FSDP, which uses its own streams even with a single worker.
        workspaces: sizes that are allocated before the first step and never freed.
        streams: category -> the stream that allocates it, of sharded models.
        expandable: see `CachingAllocator`; None: as the environment says.
        flat: by FSDP1. Its gathered parameters can be reused only when the device has computed with them.
    """
    allocator = CachingAllocator(expands() if expandable is None else expandable)
    for number, size in enumerate(workspaces):
        allocator.allocate(("workspace", number), size)
    events = [event for event in profile.events if event.place == "device"]
    begun = sum(event.place == "device" for event in profile.events[: profile.begun])
    there = {event.storage: event for event in events[:begun]}
    category = {event.storage: event.category for event in events}  # the last category: some are known late
    held: dict[int, int] = {}
    blocks: dict[int, tuple[int, int]] = {}  # a storage that is freed late may be allocated again before
    numbers, late = count(), deque[tuple[int, int]]()

    def hold(storage: int, num_bytes: int) -> None:
        if num_bytes == held.get(storage, 0):
            return
        is_late = flat and category[storage] == "unsharded_param"
        if held.pop(storage, 0):
            block = blocks.pop(storage)
            late.append(block) if is_late else allocator.free(block)
        if num_bytes:
            if is_late and len(late) >= _FREED_LATE:
                allocator.free(late.popleft())
            blocks[storage] = storage, next(numbers)
            allocator.allocate(blocks[storage], num_bytes, streams.get(category[storage], "") if sharded else "")
            held[storage] = num_bytes

    for with_optimizer in (False, True):
        for event in (*there.values(), *events[begun:]):  # first free what the previous step freed too
            if with_optimizer or event.category != "optimizer":
                hold(event.storage, event.num_bytes)
        for storage in held.keys() - there.keys():  # an equal storage existed before the step
            hold(storage, 0)
    return Peaks(allocator.peak_active, allocator.peak_reserved)
