"""What a step of one rank does, as plain values: units, collectives, FLOPs, the peak and the time. Imports no torch."""

from __future__ import annotations

import os
import re
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from typing import TYPE_CHECKING

from fsdp_lab.config import SweepConfig, UserError, workers_of
from fsdp_lab.forecast.devices import data_sheet, for_cuda
from fsdp_lab.forecast.request import Request
from fsdp_lab.forecast.speed.program import Kind, Operator, Stream
from fsdp_lab.memory.profile import CATEGORIES, PLACES, Held, Peak, Profile
from fsdp_lab.training.layout import Unit, shortened

if TYPE_CHECKING:
    from fsdp_lab.forecast.step import Step

ROOT, NO_UNIT = "<root>", "-"
OPERATIONS = {Kind.gather: "all_gather", Kind.scatter: "reduce_scatter", Kind.reduce: "all_reduce"}
_LARGEST = 5
_NAMED = 3  # modules per kind of operator
_MODULES = 24  # per category
BY_MODULE = ("activation", "temp")  # categories that no unit explains
_BEFORE = ("param", "optimizer", "buffer", "input")  # categories that exist before the step


@dataclass(frozen=True)
class Sent:
    """Equal collectives of a phase.

    Attributes:
        unit: the unit, or the module of an activation; `-`: neither.
        bytes: of one collective, over all its ranks.
        group: the ranks: `0-7`, or `0-56:8` for every eighth.
    """

    phase: str
    operation: str
    unit: str
    calls: int
    bytes: int
    dtype: str
    group: str


@dataclass(frozen=True)
class Work:
    """The FLOPs of a kind of operator in a phase and type, and the modules that have most of them."""

    kind: str
    phase: str
    dtype: str
    flops: int
    modules: str


@dataclass(frozen=True)
class Highest:
    """The peak of a place: its bytes, and when it occurs, such as "in forward of head"."""

    place: str
    bytes: int
    where: str


@dataclass(frozen=True)
class Part:
    """A category at a peak, with the unit of its largest tensor; or a tensor, with the module that allocated it."""

    place: str
    category: str
    bytes: int
    unit: str
    module: str = ""


@dataclass(frozen=True)
class Time:
    """The predicted step, and its range."""

    ms: float
    low_ms: float
    high_ms: float


@dataclass(frozen=True)
class StepPlan:
    """What the second step of rank 0 does.

    Attributes:
        setting: the values of the swept keys; "": there is one setting.
        device: `cuda`, `cpu`, or the name of a data sheet.
        units: equal ones in one row; `*` in a name stands for any number.
        modules: at a peak, what modules hold of categories that no unit explains, by pattern of their names.
        collectives: in the order of their first occurrence.
        time: None: no device was named, or see `no_time`.
    """

    setting: str
    workers: int
    device: str
    units: list[Unit] = field(default_factory=list)
    collectives: list[Sent] = field(default_factory=list)
    flops: list[Work] = field(default_factory=list)
    peaks: list[Highest] = field(default_factory=list)
    categories: list[Part] = field(default_factory=list)
    modules: list[Part] = field(default_factory=list)
    largest: list[Part] = field(default_factory=list)
    time: Time | None = None
    no_time: str = ""


def request_of(config: SweepConfig) -> Request:
    """Return the request for a plan, which is the same on every machine. Without a device it is for GPUs."""
    if config.forecast.device == "auto":
        config = replace(config, forecast=replace(config.forecast, device="cuda"))
    return Request(config, workers_of(config), for_cuda(config), None, sheet=data_sheet(config))


def make_plan(request: Request, setting: str = "") -> StepPlan:
    """Follow a step in this process, which must have no process group.

    Raises:
        UserError: see `forecast_step`.
    """
    from fsdp_lab.forecast.forecast import forecast_step, price

    config, sheet = request.config, request.sheet
    step = forecast_step(config, request.num_workers, request.cuda, sheet=sheet, traced=True)
    kind = "cuda" if request.cuda else "cpu"
    plan = plan_of(step, setting, request.num_workers, sheet.name if sheet else kind)
    if sheet is None:
        return plan
    try:
        speed = price(step, config, request.num_workers, sheet)
    except UserError as error:  # the rest is still valid
        return replace(plan, no_time=str(error))
    ms = (float(f"{seconds * 1e3:.4g}") for seconds in (speed.step_s, speed.low_s, speed.high_s))
    return replace(plan, time=Time(*ms))


def answer(question: tuple[Request, str]) -> StepPlan | UserError:
    """Make a plan in a process of a pool, or return why there is none."""
    os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")  # no context on a GPU that trains
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        return make_plan(*question)
    except UserError as error:
        return UserError(str(error))
    except Exception as error:  # noqa: BLE001 - printed; the others continue
        traceback.print_exception(error)
        return UserError(f"{type(error).__name__}: {error}")


def plan_of(step: Step, setting: str, workers: int, device: str) -> StepPlan:
    """Return the plan of a step that was traced, without its time."""
    units, labels = _units(step.units)
    plan = StepPlan(setting, workers, device, units, _collectives(step.program, labels))
    flops: dict[tuple[str, str, str], Counter[str]] = {}
    for one in step.program:
        if one.flops:
            of = flops.setdefault((one.kind.value, one.phase, one.dtype), Counter())
            of[pattern(one.module) or NO_UNIT] += int(one.flops)
    for key, of in sorted(flops.items()):
        largest = sorted(of, key=lambda name: (-of[name], name))[:_NAMED]
        plan.flops.append(Work(*key, of.total(), ", ".join(largest)))
    for place in PLACES:
        if (peak := step.profile.peak(place)) is not None:
            _add_peak(plan, step.profile, place, peak, labels)
    return plan


def _units(units: Sequence[Unit]) -> tuple[list[Unit], dict[str, str]]:
    """Return a row for equal units, and the name of each unit -> that of its row."""
    alike: dict[tuple[str, Unit], list[Unit]] = {}
    units = [replace(unit, unit=unit.unit or ROOT) for unit in units]
    for unit in units:
        same = replace(unit, unit="", weights=pattern(unit.weights), trained=0)
        alike.setdefault((pattern(unit.unit), same), []).append(unit)
    rows, labels = [], dict[str, str]()
    for (_, row), some in alike.items():
        if len(some) == 1:
            row, label = some[0], some[0].unit
        else:
            patterns = shortened([one.unit for one in some], [one.unit for one in units])
            label = patterns[0] if len(patterns) == 1 else f"{some[0].unit} ... {some[-1].unit}"
        labels |= dict.fromkeys((one.unit for one in some), label)
        rows.append(replace(row, unit=label, count=len(some), trained=sum(one.trained for one in some)))
    return rows, labels


def _collectives(program: Sequence[Operator], labels: Mapping[str, str]) -> list[Sent]:
    calls = Counter[Sent]()
    for one in program:
        if one.kind.is_collective:
            in_ddp = one.kind is Kind.reduce and one.stream is Stream.scatter and one.phase == "backward"
            of_unit = one.unit is not None or in_ddp
            unit = labels.get(name := one.unit or ROOT, name) if of_unit else pattern(one.module) or NO_UNIT
            operation, group = OPERATIONS[one.kind], group_text(one.group)
            calls[Sent(one.phase, operation, unit, 0, int(one.num_bytes), one.dtype, group)] += 1
    return [replace(sent, calls=count) for sent, count in calls.items()]


def group_text(ranks: Sequence[int]) -> str:
    """Return the ranks of a group: `0-7`, `0-56:8` or `0,1,5`."""
    steps = {after - before for before, after in pairwise(ranks)}
    if len(steps) != 1:
        return ",".join(map(str, ranks))
    (step,) = steps
    return f"{ranks[0]}-{ranks[-1]}" + (f":{step}" if step > 1 else "")


def _add_peak(plan: StepPlan, profile: Profile, place: str, peak: Peak, labels: Mapping[str, str]) -> None:
    held = _held_at(profile, peak.index, place)
    by_size = sorted(held, key=lambda number: -held[number].num_bytes)
    owners = {number: _owner(held[number], labels, plan.collectives) for number in by_size}
    event = profile.events[peak.index]
    where = f"in {event.phase} of {event.module}" if event.module else f"in {event.phase}"
    if peak.index < profile.begun:
        where = "before the step"
    elif event.storage in held and (held[event.storage].category, owners[event.storage]) == ("reduce_scatter", ROOT):
        where = "at the end of backward"  # the root is reduced here, whatever module is active
    plan.peaks.append(Highest(place, peak.total, where))
    for category in CATEGORIES:
        if some := [number for number in by_size if held[number].category == category]:
            size = sum(held[number].num_bytes for number in some)
            plan.categories.append(Part(place, category, size, owners[some[0]]))
            if category in BY_MODULE:
                sizes = Counter[str]()
                for number in some:
                    sizes[pattern(held[number].module) or NO_UNIT] += held[number].num_bytes
                for name in sorted(sizes, key=lambda name: (-sizes[name], name))[:_MODULES]:
                    plan.modules.append(Part(place, category, sizes[name], NO_UNIT, name))
    for number in by_size[:_LARGEST]:
        of = held[number]
        plan.largest.append(Part(place, of.category, of.num_bytes, owners[number], of.module or owners[number]))


def _held_at(profile: Profile, index: int, place: str) -> dict[int, Held]:
    """Return what a place holds after an event, by storage; a new storage with the category it gets a moment later."""
    _, alive = next(islice(profile.states(place), index, None))
    held = dict(alive)
    for event in reversed(profile.events[index + 1 :]):  # the first one after it counts
        if event.num_bytes and event.storage in held and alive[event.storage].category == "temp":
            held[event.storage] = alive[event.storage]._replace(category=event.category)
    return held


def _owner(held: Held, labels: Mapping[str, str], collectives: Sequence[Sent]) -> str:
    """Return the unit of a tensor: the one with a collective of that many bytes, or the innermost around the module."""
    if not held.module and held.category in _BEFORE:
        return NO_UNIT
    for one in collectives:  # of the category named like the operation
        if (one.operation, one.bytes) == (held.category, held.num_bytes):
            return one.unit
    around = [name for name in labels if any(f"{held.module}.".startswith(f"{m}.") for m in name.split(", "))]
    return labels[max(around, key=len)] if around else ROOT


def pattern(name: str) -> str:
    """Return a name with `*` for each number."""
    return re.sub(r"\d+", "*", name)
