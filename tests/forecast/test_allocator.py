"""The caching allocator without a GPU: PyTorch's own constants, and requests that were worked out by hand."""

from __future__ import annotations

import itertools
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_lab.forecast import allocator as rules
from fsdp_lab.forecast.allocator import STREAMS_BEFORE_129721, CachingAllocator, allocator_peaks
from fsdp_lab.training.profile import Event, Profile

MIB = 2**20


def test_the_sizes_are_those_of_this_pytorch():
    header = Path(torch.__file__).parent / "include/c10/core/AllocatorConfig.h"
    if not header.exists():
        pytest.skip("this PyTorch names its allocator's constants in no header")
    named = dict(re.findall(r"constexpr size_t (k\w+) = (\d+);", header.read_text()))
    ours = {
        "kMinBlockSize": rules.MIN_BLOCK,
        "kSmallSize": rules.SMALL_SIZE,
        "kSmallBuffer": rules.SMALL_SEGMENT,
        "kMinLargeAlloc": rules.MIN_OWN_SEGMENT,
        "kRoundLarge": rules.ROUND_LARGE,
    }
    assert {name: int(named[name]) for name in ours} == ours
    shared = re.search(r"large_segment_size_\{(\d+)\}", header.read_text())  # older versions have it in no header
    assert shared is None or int(shared[1]) == rules.LARGE_SEGMENT


@pytest.mark.parametrize(
    ("requested", "active", "reserved"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),  # the largest small one
        (MIB + 1, MIB + 512, 20 * MIB),
        (9 * MIB, 9 * MIB, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),  # the smallest with a segment of its own
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),  # almost 2 MiB are left: cut off
        (11 * MIB, 12 * MIB, 12 * MIB),  # just 1 MiB is left: it stays with the block
    ],
)
def test_one_request(requested: int, active: int, reserved: int):
    allocator = CachingAllocator()
    allocator.allocate("a", requested)
    assert (allocator.requested, allocator.active, allocator.reserved) == (requested, active, reserved)
    allocator.free("a")
    assert (allocator.requested, allocator.active, allocator.reserved) == (0, 0, reserved), "freed, and kept"
    allocator.allocate("b", requested)
    assert allocator.reserved == reserved, "taken again"


@pytest.mark.parametrize(
    ("steps", "reserved"),
    [
        # another stream does not get a freed block
        ("+a16@gather -a +b16", 32),
        # the smallest that is large enough: 18 out of the 20, of which 2 are cut off, 40 of the 40, and 3 of neither
        ("+x40 +y20 -x -y +a18 +b40", 60),
        ("+x40 +y20 -x -y +a18 +b40 +c3", 80),
        # free neighbours become one block: 18 of the 20 MiB of one segment, of which the last freed has two
        ("+a6 +b6 +c6 -a -c -b +d20", 20),
    ],
)
def test_which_block_is_taken(steps: str, reserved: int):
    """Steps: `+a16@gather` asks for 16 MiB on a stream, `-a` frees them; then so many MiB are reserved."""
    assert after(CachingAllocator(), steps).reserved == reserved * MIB


def after(allocator: CachingAllocator, steps: str) -> CachingAllocator:
    for step in steps.split():
        if step[0] == "-":
            allocator.free(step[1])
        else:
            size, _, stream = step[2:].partition("@")
            allocator.allocate(step[1], int(size) * MIB, stream)
    return allocator


def test_at_any_time_blocks_are_whole_and_apart():
    """Ten thousand requests at random: each segment stays covered by its blocks, once, and the sums agree."""
    rng = random.Random(0)
    allocator, held = CachingAllocator(), {}
    for number in range(10_000):
        if held and rng.random() < 0.5:
            key = rng.choice(list(held))
            allocator.free(key)
            del held[key]
        else:
            held[number] = rng.choice([rng.randint(1, 4000), rng.randint(1, 30 * MIB)])
            allocator.allocate(number, held[number], rng.choice(["", "gather"]))
    used = [block for block, _ in allocator._blocks.values()]
    free = [block for blocks in allocator._free.values() for _, _, block in blocks]
    assert allocator.requested == sum(held.values())
    assert allocator.active == sum(block.size for block in used)
    assert allocator.reserved == sum(block.size for block in [*used, *free])
    spans = sorted((block.address, block.address + block.size) for block in [*used, *free])
    assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(spans))
    assert not any(block.after is not None and block.after.free for block in free), "free neighbours are one"


Step = list[tuple[int, str, int]]  # storage, category, MiB from now on
ACTIVATION: Step = [(1, "activation", 16), (1, "activation", 0)]
GATHERED: Step = [(0, "all_gather", 16), (0, "all_gather", 0), *ACTIVATION]
SCATTERED: Step = [(0, "reduce_scatter", 16), (0, "reduce_scatter", 0), *ACTIVATION]
REDUCED: Step = [(0, "temp", 16), (0, "grad", 16), (0, "grad", 0), *ACTIVATION]


@pytest.mark.parametrize(
    ("step", "begun", "sharded", "more", "reserved"),
    [
        # The optimizer's state comes after the first step. That leaves 30 MiB free where its activations were. The
        # state takes 20 of them, and the second step's activations do not fit into the 10 that are left.
        ([(0, "param", 10), (1, "optimizer", 20), (2, "activation", 30), (2, "activation", 0)], 2, True, {}, 70),
        ([(2, "activation", 30), (2, "activation", 0)], 0, True, {"workspaces": [32 * MIB]}, 62),
        # what is known for something else later stays where it is
        ([(0, "temp", 16), (0, "activation", 16), (0, "activation", 0)], 0, True, {}, 16),
        # what is gathered lies in a pool of its own where the model is sharded
        (GATHERED, 0, True, {}, 32),
        (GATHERED, 0, False, {}, 16),
        # what is scattered lay in one before pytorch#129721: the compute stream could not have it
        (SCATTERED, 0, True, {}, 16),
        (SCATTERED, 0, True, {"streams": STREAMS_BEFORE_129721}, 32),
        # a single worker gathers nothing and reduces on a stream of its own
        (REDUCED, 0, True, {}, 32),
    ],
)
def test_what_a_step_reserves_in_pools_of_its_streams(
    step: Step, begun: int, sharded: bool, more: dict[str, Any], reserved: int
):
    events = [Event(storage, "device", category, mib * MIB, "", "forward") for storage, category, mib in step]
    assert allocator_peaks(Profile(events, begun), sharded, **more).reserved == reserved * MIB


def test_an_expandable_segment_grows_by_what_its_free_end_lacks():
    """Worked out by hand: a stream has one segment, of pages of 20 MiB, so its freed blocks serve larger requests."""
    allocator = CachingAllocator(expandable=True)
    for steps, reserved in (
        ("+a30 -a +b50", 60),  # 40 MiB, then one more page; in plain segments 80
        ("+c10", 60),  # the end of the segment
        ("-b -c +d60", 60),  # both are one block again
        ("+e10@other", 80),
    ):
        assert after(allocator, steps).reserved == reserved * MIB, steps
    assert allocator.active == 70 * MIB
    assert after(CachingAllocator(), "+a30 -a +b50").reserved == 80 * MIB


def test_the_end_of_an_expandable_segment_is_taken_last():
    """52 of 60 MiB: 5 come from the hole of 30, not from the 8 at the end, which 8 more fill. Then 17 of the hole are
    left, and 25 need another page."""
    allocator = after(CachingAllocator(expandable=True), "+a30 +b10 +c12 -a +d5 +e8 +f25")
    assert allocator.reserved == 80 * MIB
