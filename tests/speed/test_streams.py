"""Schedules worked by hand: a unit is gathered in 2 s and computes for 3."""

from __future__ import annotations

import pytest

from fsdp_lab.forecast.speed.program import Kind, Operator, Stream
from fsdp_lab.forecast.speed.streams import Slot, schedule


def gathers(unit: int) -> list[tuple[Operator, float]]:
    """Copy in, gather, copy out: 0, 2 and 0 s."""
    shard, buffer, weights = 100 + unit, 200 + unit, 300 + unit
    return [
        (Operator("copy", Kind.memory, Stream.copy_in, "forward", "", reads=(unit,), writes=(shard,)), 0.0),
        (Operator("gather", Kind.gather, Stream.gather, "forward", "", reads=(shard,), writes=(buffer,)), 2.0),
        (Operator("fsdp.split_with_sizes_copy", Kind.memory, Stream.compute, "forward", "", reads=(buffer,),
                  writes=(weights,)), 0.0),
    ]  # fmt: skip


def computes(unit: int, seconds: float = 3.0) -> tuple[Operator, float]:
    reads = (300 + unit, 400 + unit)
    return (Operator("mm", Kind.matmul, Stream.compute, "forward", "", reads=reads, writes=(401 + unit,)), seconds)


def run(
    *timed: tuple[Operator, float], launch_s: float = 0.0, separate: bool = False, synchronous: bool = False
) -> list[Slot]:
    program, durations = zip(*timed, strict=True)
    return schedule(program, durations, launch_s, separate, synchronous)


def end(made: list[Slot]) -> float:
    return max(slot.end for slot in made)


def busy(made: list[Slot]) -> dict[Stream, float]:
    """The seconds that each stream is busy."""
    streams = {slot.operator.stream for slot in made}
    return {one: sum(slot.end - slot.begin for slot in made if slot.operator.stream is one) for one in streams}


def forward(units: int, seconds: float = 3.0) -> list[tuple[Operator, float]]:
    return [one for unit in range(units) for one in (*gathers(unit), computes(unit, seconds))]


def test_a_gather_hides_behind_the_unit_before():
    """Only the first is waited for: 2 + 3 * 3."""
    assert end(run(*forward(3))) == pytest.approx(11.0)


def test_computing_waits_for_its_own_gather():
    """Computing of 1 s hides nothing but itself: three gathers of 2 s one after the other, then the last second."""
    assert end(run(*forward(3, seconds=1.0))) == pytest.approx(7.0)


def test_two_gathers_are_ahead_at_most():
    """The third waits until the first was copied out, at 2 s, which here changes nothing, and the fourth until the
    second was, at 5 s: it begins there, though its stream is free from 6 s on only."""
    slots = [slot for slot in run(*forward(4)) if slot.operator.kind is Kind.gather]
    assert [slot.begin for slot in slots] == pytest.approx([0.0, 2.0, 4.0, 6.0])
    slow = [slot for slot in run(*forward(4, seconds=9.0)) if slot.operator.kind is Kind.gather]
    assert [slot.begin for slot in slow] == pytest.approx([0.0, 2.0, 4.0, 11.0]), "9 s of computing behind the first"


@pytest.mark.parametrize(("separate", "seconds"), [(False, 4.0), (True, 2.0)])
def test_gathers_and_scatters_share_a_communicator_unless_configured_otherwise(separate: bool, seconds: float):
    gather = Operator("gather", Kind.gather, Stream.gather, "backward", "", reads=(1,), writes=(2,))
    scatter = Operator("scatter", Kind.scatter, Stream.scatter, "backward", "", reads=(3,), writes=(4,))
    assert end(run((gather, 2.0), (scatter, 2.0), separate=separate)) == pytest.approx(seconds)


def test_what_is_written_waits_for_those_who_still_read_it():
    reads = Operator("reads", Kind.memory, Stream.scatter, "backward", "", reads=(1,), writes=(2,))
    writes = Operator("writes", Kind.memory, Stream.compute, "backward", "", reads=(), writes=(1,))
    assert end(run((reads, 2.0), (writes, 1.0))) == pytest.approx(3.0)


def test_the_host_that_issues_too_slowly_is_waited_for():
    """Ten operators that take no time, one issued each 0.1 s."""
    made = run(*forward(2, seconds=0.0)[:2], *forward(2, 0.0)[3:], launch_s=0.1)
    assert end(made) >= 0.1 * len(made) - 1e-9


def collective(kind: Kind, stream: Stream, group: tuple[int, ...], storage: int) -> Operator:
    return Operator(kind.value, kind, stream, "backward", "", reads=(storage,), writes=(storage + 1,), group=group)


def test_groups_that_share_no_communicator_do_not_wait_for_each_other():
    """2 s each: side by side where the groups differ, one after the other in one group."""
    gather = collective(Kind.gather, Stream.gather, (0, 1), 10)
    for group, expected in (((0, 2), 2.0), ((0, 1), 4.0)):
        reduce = collective(Kind.reduce, Stream.scatter, group, 20)
        assert end(run((gather, 2.0), (reduce, 2.0))) == expected
    same = collective(Kind.scatter, Stream.scatter, (0, 1), 20)
    assert end(run((gather, 2.0), (same, 2.0), separate=True)) == 2.0


def test_the_next_gradients_are_copied_when_the_scatter_before_is_over():
    """Copied at 0, scattered from 1 to 6; the unit after computes until 2, and its copying waits for 6."""

    def copy(unit: int) -> tuple[Operator, float]:
        return (Operator("fsdp.chunk_cat", Kind.memory, Stream.compute, "backward", "", reads=(unit,),
                         writes=(unit + 100,)), 1.0)  # fmt: skip

    def scatter(unit: int) -> tuple[Operator, float]:
        return (collective(Kind.scatter, Stream.scatter, (0, 1), unit + 100), 5.0)

    compute = (Operator("mm", Kind.matmul, Stream.compute, "backward", "", reads=(7,), writes=(5,)), 1.0)
    result = run(copy(1), scatter(1), compute, copy(5), scatter(5))
    assert [(slot.begin, slot.end) for slot in result] == [(0, 1), (1, 6), (1, 2), (6, 7), (7, 12)]


def hybrid(stream: Stream) -> list[tuple[Operator, float]]:
    """The reductions of 32 blocks of Llama 3 8B on 64 replicas of 8 H100s, in ms.

    A block's gradients, 872 MB in float32, are scattered within a node in 4.9, and an eighth of them is reduced between
    nodes in 13.9, where that reaches 35 % of 3,200 Gbit/s.
    """
    return [
        one
        for unit in range(0, 320, 10)
        for one in (
            (collective(Kind.scatter, Stream.scatter, tuple(range(8)), unit), 4.9),
            (collective(Kind.reduce, stream, tuple(range(0, 512, 8)), unit + 1), 13.9),
        )
    ]


def test_replicas_reduce_while_the_next_unit_is_scattered():
    """The first scatter, then 32 all-reduces; one after the other, on one stream, they take 602."""
    assert end(run(*hybrid(Stream.all_reduce))) == pytest.approx(4.9 + 32 * 13.9)
    assert end(run(*hybrid(Stream.scatter))) == pytest.approx(32 * (4.9 + 13.9))


def test_groups_that_cross_between_nodes_take_turns_on_the_network():
    """Two nodes of two: both groups cross in the first case; in the second one of them is within a node."""
    for scattering, expected in (((0, 1, 2, 3), 4.0), ((0, 1), 2.0)):
        scatter = (collective(Kind.scatter, Stream.scatter, scattering, 10), 2.0)
        reduce = (collective(Kind.reduce, Stream.all_reduce, (0, 2), 20), 2.0)
        program, durations = zip(scatter, reduce, strict=True)
        assert end(schedule(program, durations, 0.0, node_size=2)) == expected


def test_a_cpu_does_one_thing_after_the_other_but_for_ddps_reductions():
    gather = collective(Kind.gather, Stream.gather, (0, 1), 10)
    reduce = collective(Kind.reduce, Stream.scatter, (0, 1), 20)
    assert end(run((gather, 2.0), computes(7))) == 3.0
    assert end(run((gather, 2.0), computes(7), synchronous=True)) == 5.0
    assert end(run((reduce, 2.0), computes(7), synchronous=True)) == 3.0
