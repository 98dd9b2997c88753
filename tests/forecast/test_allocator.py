"""The caching allocator without a GPU: PyTorch's own constants, and requests that were worked out by hand."""

from __future__ import annotations

import itertools
import random
import re
from pathlib import Path

import pytest
import torch

from fsdp_lab.forecast import allocator as rules
from fsdp_lab.forecast.allocator import STREAMS_BEFORE_129721, CachingAllocator, allocator_peaks
from fsdp_lab.forecast.forecast import forecast_profile
from fsdp_lab.training.profile import Event, Profile
from tests.ranks import config

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


def test_a_block_of_another_stream_is_not_taken():
    allocator = CachingAllocator()
    allocator.allocate("a", 16 * MIB, "gather")
    allocator.free("a")
    allocator.allocate("b", 16 * MIB)
    assert allocator.reserved == 32 * MIB


def test_the_smallest_block_that_is_large_enough_is_taken():
    allocator = CachingAllocator()
    allocator.allocate("40", 40 * MIB)
    allocator.allocate("20", 20 * MIB)
    allocator.free("40")
    allocator.free("20")
    allocator.allocate("a", 18 * MIB)  # out of the 20, of which 2 are cut off
    allocator.allocate("b", 40 * MIB)  # the 40 are whole still
    assert allocator.reserved == 60 * MIB
    allocator.allocate("c", 3 * MIB)  # the 2 that are left do not do
    assert allocator.reserved == 80 * MIB


def test_neighbours_that_are_free_become_one_block():
    allocator = CachingAllocator()
    for key in "abc":
        allocator.allocate(key, 6 * MIB)  # 18 of the 20 MiB of one segment
    for key in "acb":  # the last has a free neighbour on either side
        allocator.free(key)
    allocator.allocate("all", 20 * MIB)
    assert allocator.reserved == 20 * MIB


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


def _event(storage: int, category: str, mib: int) -> Event:
    return Event(storage, "device", category, mib * MIB, "", "forward")


def test_the_optimizers_state_comes_after_the_first_step():
    """The first step leaves 30 MiB free where its activations were. The state takes 20 of them, and the second
    step's activations do not fit into the 10 that are left."""
    before = [_event(0, "param", 10), _event(1, "optimizer", 20)]
    step = [_event(2, "activation", 30), _event(2, "activation", 0)]
    assert allocator_peaks(Profile([*before, *step], begun=2), sharded=True).reserved == (10 + 30 + 30) * MIB
    assert allocator_peaks(Profile(step, begun=0), True, workspaces=[32 * MIB]).reserved == (32 + 30) * MIB


def test_a_storage_that_is_known_for_something_else_later_stays_where_it_is():
    step = [_event(0, "temp", 16), _event(0, "activation", 16), _event(0, "activation", 0)]
    assert allocator_peaks(Profile(step, begun=0), sharded=True).reserved == 16 * MIB


def test_what_is_gathered_lies_in_a_pool_of_its_own_where_the_model_is_sharded():
    step = [_event(0, "all_gather", 16), _event(0, "all_gather", 0), _event(1, "activation", 16)]
    profile = Profile([*step, _event(1, "activation", 0)], begun=0)
    assert allocator_peaks(profile, sharded=True).reserved == 32 * MIB
    assert allocator_peaks(profile, sharded=False).reserved == 16 * MIB


def test_what_is_scattered_lay_in_a_pool_of_its_own_before_129721():
    """16 MiB that activations get again today; the compute stream could not have them then."""
    step = [_event(0, "reduce_scatter", 16), _event(0, "reduce_scatter", 0), _event(1, "activation", 16)]
    profile = Profile([*step, _event(1, "activation", 0)], begun=0)
    assert allocator_peaks(profile, sharded=True).reserved == 16 * MIB
    assert allocator_peaks(profile, True, streams=STREAMS_BEFORE_129721).reserved == 32 * MIB
    assert allocator_peaks(profile, False, streams=STREAMS_BEFORE_129721).reserved == 16 * MIB


def test_a_single_worker_gathers_nothing_and_reduces_on_a_stream_of_its_own():
    step = [_event(0, "temp", 16), _event(0, "grad", 16), _event(0, "grad", 0), _event(1, "activation", 16)]
    profile = Profile([*step, _event(1, "activation", 0)], begun=0)
    assert allocator_peaks(profile, sharded=True).reserved == 32 * MIB
    alone = forecast_profile(config("model=mlp", "sharding=root"), 1, cuda=True)
    assert not any(event.category == "all_gather" for event in alone.events), "what told sharding before"
    assert allocator_peaks(alone, sharded=True).reserved > allocator_peaks(alone, sharded=False).reserved


@pytest.mark.parametrize("words", [["sharding=ddp"], ["sharding=per_block"], ["sharding=root", "offload=cpu"]])
def test_what_is_reserved_covers_the_peak(words: list[str]):
    profile = forecast_profile(config("model=mlp", *words), 2, cuda=True)
    peak = profile.peaks["device"]["total"]
    assert peak < allocator_peaks(profile, "sharding=ddp" not in words).reserved < 2 * peak + 64 * MIB


def test_an_expandable_segment_grows_by_what_its_free_end_lacks():
    """Worked out by hand: a stream has one segment, of pages of 20 MiB, so its freed blocks serve larger requests."""
    allocator, plain = CachingAllocator(expandable=True), CachingAllocator()
    for one in (allocator, plain):
        one.allocate("a", 30 * MIB)
        one.free("a")
        one.allocate("b", 50 * MIB)
    assert plain.reserved == 80 * MIB, "two segments"
    assert allocator.reserved == 60 * MIB, "40 MiB, then one more page"
    allocator.allocate("c", 10 * MIB)
    assert allocator.reserved == 60 * MIB, "the end of the segment"
    allocator.free("b")
    allocator.free("c")
    allocator.allocate("d", 60 * MIB)
    assert allocator.reserved == 60 * MIB, "both are one block again"
    allocator.allocate("e", 10 * MIB, "another stream")
    assert (allocator.reserved, allocator.active) == (80 * MIB, 70 * MIB)


def test_the_end_of_an_expandable_segment_is_taken_last():
    allocator = CachingAllocator(expandable=True)
    for key, size in (("a", 30), ("b", 10), ("c", 12)):  # 52 of 60 MiB
        allocator.allocate(key, size * MIB)
    allocator.free("a")
    allocator.allocate("d", 5 * MIB)  # from the hole of 30, not from the 8 at the end
    allocator.allocate("e", 8 * MIB)
    allocator.allocate("f", 25 * MIB)
    assert allocator.reserved == 80 * MIB, "17 of the hole are left, and 8 at the end, which a page makes 28"
