"""Extends the step of a model with a few equal blocks to one with many: change by change, operator by operator."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import isclose
from typing import Any, NamedTuple

from fsdp_lab.forecast.speed.program import Operator
from fsdp_lab.forecast.speed.streams import schedule
from fsdp_lab.forecast.step import Step
from fsdp_lab.memory.profile import Event, Profile
from fsdp_lab.training.layout import Unit

NONE = -1  # the label of an item that belongs to no block
REPEATED = 2  # the period to repeat: the first two and the last two may differ from it
_SIZES = ("num_bytes", "flops", "parameters", "sharded", "gathered", "trained")  # grow with the blocks
_FIRST = 5  # periods of the smaller step


@dataclass(frozen=True)
class Stack:
    """A list of blocks in a model, equal with a period.

    Attributes:
        name: of the list.
        count: of the blocks.
        period: the distance from a block to the next equal one, in blocks.
    """

    name: str
    count: int
    period: int

    @property
    def few(self) -> int:
        """Return the number of blocks of the smaller step."""
        return _FIRST * self.period + self.count % self.period

    @property
    def more(self) -> int:
        """Return the number of periods to add for all blocks."""
        return (self.count - self.few) // self.period

    def label(self, module: str) -> int:
        """Return the period of the block that a module is in."""
        inside = re.match(rf"{re.escape(self.name)}\.(\d+)(?:\.|$)", module)
        return int(inside[1]) // self.period if inside else NONE

    def moved(self, module: str, periods: int) -> str:
        """Return the name of the equal module so many periods later; also for several names, separated by commas."""
        if "," in module:
            return ", ".join(self.moved(name, periods) for name in module.split(", "))
        if not periods or self.label(module) == NONE:
            return module
        at, _, rest = module[len(self.name) + 1 :].partition(".")
        return ".".join(filter(None, (self.name, str(int(at) + periods * self.period), rest)))


def deepened(few: Step, more: Step, stack: Stack) -> Step | None:
    """Return the step of all blocks of a stack; None if it does not follow from those of a few.

    Args:
        few: of `stack.few` blocks.
        more: the step with one more period, to verify the extension of `few`.
    """
    named = (*few.layout.units, *few.layout.blocks, *few.layout.last)
    if few.layout != more.layout or any(stack.label(name) != NONE for name in named):
        return None
    profile, again = (_profile(few.profile, more.profile, stack, times) for times in (stack.more, 1))
    if profile is None or again is None or not _same_profile(again, more.profile):
        return None
    program, once = (_program(few.program, more.program, stack, times) for times in (stack.more, 1))
    if program is None or once is None or not _same_program(once, more.program):
        return None
    units, one_more = (_units(few.units, more.units, stack, times) for times in (stack.more, 1))
    if units is None or one_more != more.units:
        return None
    sizes = [
        low + stack.more * (high - low)
        for low, high in zip((*few.num_params, few.num_trained), (*more.num_params, more.num_trained), strict=True)
    ]
    whole, own, trained = sizes
    return few._replace(profile=profile, program=program, num_params=(whole, own), num_trained=trained, units=units)


def _profile(few: Profile, more: Profile, stack: Stack, times: int) -> Profile | None:
    owners: dict[int, list[str]] = {}

    def made(event: Event, label: int, later: int, refer: Refer) -> Event:
        (storage,) = refer(event.storage)
        if owner := few.owners.get(event.storage):
            owners.setdefault(storage, [stack.moved(name, later) for name in owner])
        return replace(event, storage=storage, module=stack.moved(event.module, later))

    def sequence(profile: Profile) -> _Sequence:
        begun, known = profile.begun, dict[int, int]()
        labels = [NONE] * begun + _between([stack.label(event.module) for event in profile.events[begun:]])
        for place, event in enumerate(profile.events):  # outside of blocks, by the parameter or by its origin
            owners = {*map(stack.label, profile.owners.get(event.storage, ()))}
            if labels[place] == NONE:
                labels[place] = owners.pop() if len(owners) == 1 else known.get(event.storage, NONE)
            known.setdefault(event.storage, labels[place])
        labels = [*_between(labels[:begun]), *_between(labels[begun:])]
        return _Sequence(profile.events, labels, lambda event: [event.storage], begun)

    short = _grown(sequence(few), sequence(more), times, ("place", "category", "module", "phase"))
    if short is None:
        return None
    events = short.repeated(times, made)
    begun = len(_Sequence(short.items[: short.cut], short.labels[: short.cut], short.storages, 0).repeated(times, made))
    return Profile(events, begun, owners=owners).with_peaks()


def _program(few: Sequence[Operator], more: Sequence[Operator], stack: Stack, times: int) -> list[Operator] | None:
    def made(operator: Operator, label: int, later: int, refer: Refer) -> Operator:
        reads, writes = (tuple(one for s in some for one in refer(s)) for some in (operator.reads, operator.writes))
        unit = operator.unit
        if unit is not None:  # an operator of no period may gather for a late period
            late = label == NONE and stack.label(unit.partition(",")[0]) > REPEATED
            unit = stack.moved(unit, times if late else later)
        return replace(operator, module=stack.moved(operator.module, later), unit=unit, reads=reads, writes=writes)

    def sequence(program: Sequence[Operator]) -> _Sequence:
        labels, known = [], dict[int, int]()
        for operator in program:
            label, storages = stack.label(operator.module), (*operator.reads, *operator.writes)
            if label == NONE and operator.phase == "optimizer":  # of one parameter
                of = {known.get(storage, NONE) for storage in storages} - {NONE}
                label = of.pop() if len(of) == 1 else NONE
            known |= {storage: label for storage in storages if storage not in known}
            labels.append(label)
        return _Sequence(program, _between(labels), lambda one: [*one.reads, *one.writes], 0)

    short = _grown(
        sequence(few), sequence(more), times, ("name", "kind", "stream", "phase", "module", "dtype", "group", "shape")
    )
    return None if short is None else short.repeated(times, made)


def _units(few: Sequence[Unit], more: Sequence[Unit], stack: Stack, times: int) -> list[Unit] | None:
    labels, other = ([stack.label(unit.unit.partition(",")[0]) for unit in some] for some in (few, more))
    short, longer = (_Sequence(some, of, lambda unit: (), 0) for some, of in ((few, labels), (more, other)))
    grown = _grown(short, longer, times, ("unit", "module", "stored", "dtype", "weights"))

    def made(unit: Unit, label: int, later: int, refer: Refer) -> Unit:
        return replace(unit, unit=stack.moved(unit.unit, later), weights=stack.moved(unit.weights, later))

    return None if grown is None else grown.repeated(times, made)


def _copies(label: int, times: int) -> Sequence[int]:
    """Return how many periods later each copy of a stretch comes."""
    return range(times + 1) if label == REPEATED else [times * (label > REPEATED)]


def _same_profile(one: Profile, other: Profile) -> bool:
    """Return whether two profiles are equal, except for the numbers of their storages."""
    numbers: dict[int, int] = {}
    renamed = [replace(e, storage=numbers.setdefault(e.storage, len(numbers))) for e in other.events]
    return one.begun == other.begun and one.events == renamed


def _same_program(one: Sequence[Operator], other: Sequence[Operator]) -> bool:
    """Return whether two programs have equal operators with equal dependencies."""
    bare = [[replace(operator, reads=(), writes=()) for operator in program] for program in (one, other)]
    if bare[0] != bare[1]:
        return False
    slots = [schedule(program, [1 + op.num_bytes % 97 for op in program], 0.1) for program in (one, other)]
    return all(isclose(a.begin, b.begin) for a, b in zip(*slots, strict=True))


Refer = Callable[[int], list[int]]  # storage -> its number in the longer sequence


class _Run(NamedTuple):
    """Items in sequence, of one period or of none.

    Attributes:
        label: the period.
        turn: the number of its pass over the periods, up or down.
    """

    label: int
    begin: int
    end: int
    turn: int


@dataclass(frozen=True)
class _Sequence:
    """Changes or operators in order.

    Attributes:
        labels: the period of each item, or `NONE`.
        storages: returns those of an item.
        cut: the index that no run crosses.
    """

    items: Sequence[Any]
    labels: Sequence[int]
    storages: Callable[[Any], Sequence[int]]
    cut: int

    def repeated(self, times: int, made: Callable[[Any, int, int, Refer], Any]) -> list[Any]:
        """Return the items with so many more copies of the repeated period.

        Args:
            made: makes an item from one, by its label and by how many periods later it is.
        """
        runs, ways = self._runs()
        homes: dict[int, tuple[int, int, int]] = {}  # storage -> its first occurrence: turn, period, position
        for run in runs:
            count = 0
            for storage in (storage for item in self.items[run.begin : run.end] for storage in self.storages(item)):
                if storage not in homes:
                    homes[storage] = (NONE, NONE, storage) if run.label == NONE else (run.turn, run.label, count)
                    count += 1
        numbers: dict[tuple[int, int, int], int] = {}

        def refer(storage: int, later: int, label: int) -> list[int]:
            turn, home, place = homes[storage]
            homes_now = [home + later if home != NONE else NONE]
            if label == NONE and home >= REPEATED:  # items of no period work for all periods
                homes_now = [home + one for one in range(times + 1)] if home == REPEATED else [home + times]
            return [numbers.setdefault((turn, one, place), len(numbers)) for one in homes_now]

        result = []
        for run in runs:
            copies = _copies(run.label, times)
            for later in copies if ways[run.turn] > 0 else reversed(copies):
                of = partial(refer, later=later, label=run.label)
                result += [made(item, run.label, later, of) for item in self.items[run.begin : run.end]]
        return result

    def _runs(self) -> tuple[list[_Run], dict[int, int]]:
        """Return the runs, and for each turn whether it goes up or down: 1 or -1."""
        runs, ways = list[_Run](), {0: 1}
        known = False  # whether the turn has two runs
        for begin, end in pairwise(_ends(self.labels, self.cut)):
            label, turn = self.labels[begin], runs[-1].turn if runs else 0
            step = label - runs[-1].label if runs and NONE not in (label, runs[-1].label) else 0
            if abs(step) == 1 and begin != self.cut and (not known or ways[turn] == step):
                ways[turn], known = step, True
            else:
                turn, known = turn + 1, False
                ways[turn] = 1
            runs.append(_Run(label, begin, end, turn))
        return runs, ways


def _ends(labels: Sequence[int], cut: int) -> list[int]:
    changes = [at for at in range(1, len(labels)) if labels[at] != labels[at - 1] or at == cut]
    return [0, *changes, len(labels)]


def _between(labels: list[int]) -> list[int]:
    """Return the labels. An item without a label between neighbours, or inside a period, gets the one before."""
    result, ends = list(labels), _ends(labels, 0)
    inner = range(1, max(labels, default=NONE))
    for begin, end in pairwise(ends[1:-1]):
        before, after = labels[begin - 1], labels[end]
        if labels[begin] == NONE and (abs(before - after) == 1 or (before == after and before in inner)):
            result[begin:end] = [before] * (end - begin)
    return result


def _grown(few: _Sequence, more: _Sequence, times: int, alike: Sequence[str]) -> _Sequence | None:
    """Return the smaller sequence, in which items of no period have the sizes for so many more periods.

    None if the sequences differ in such items.

    Args:
        alike: the fields that have to be equal.
    """
    of_few, of_more = ([at for at, label in enumerate(sequence.labels) if label == NONE] for sequence in (few, more))
    if len(of_few) != len(of_more):
        return None
    items = list(few.items)
    for at, other in zip(of_few, of_more, strict=True):
        one, two = few.items[at], more.items[other]
        if any(getattr(one, name) != getattr(two, name) for name in alike):
            return None
        sizes = [name for name in _SIZES if getattr(one, name, 0) != getattr(two, name, 0)]
        grown = {name: getattr(one, name) + times * (getattr(two, name) - getattr(one, name)) for name in sizes}
        items[at] = replace(one, **grown)
    return replace(few, items=items)
