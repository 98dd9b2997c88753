"""The file with the plans of steps, formatted for diffs, and the comparison of two files. Imports no torch."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import fsdp_lab
from fsdp_lab.config import ConfigError, UserError
from fsdp_lab.config.serialize import from_dict
from fsdp_lab.config.wording import count, four_digits, significant
from fsdp_lab.config.words import key_of
from fsdp_lab.forecast.devices import torch_version
from fsdp_lab.forecast.plan import NO_UNIT, OPERATIONS, ROOT, Sent, StepPlan, pattern
from fsdp_lab.storage.files import read_object, write_text
from fsdp_lab.training.layout import Unit

SCHEMA = 1
# Relative changes to ignore. Peak, bytes of collectives and of units, and FLOPs are exact. The predicted time changes
# with the figures of a device.
TOLERANCES = {"plan.peak": 0.0, "plan.sent": 0.0, "plan.units": 0.0, "plan.flops": 0.0, "plan.step": 0.01}
_REMEDY = "restore it from the repository, or remove it and write it again with lock={file} and all overrides"
# The lines that a tolerance allows to change if no sum changes.
_COVERED = {
    "plan.peak": ("peaks", "categories", "modules", "largest"), "plan.sent": ("collectives",), "plan.units": ("units",),
    "plan.flops": ("flops",), "plan.step": ("time", "no_time"),
}  # fmt: skip
_SHARE = 0.001  # of the FLOPs of a phase, above which another type is named
_EXPLAINED = 0.8  # the named categories explain at least this share of a peak's change
_OF_NO_UNIT = ("activation", "temp", "input")  # categories that no unit gathers or reduces
_LARGEST = 2.0**63  # of a figure
_CAUSES = 3  # causes to name per change
_SIZES = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}


@dataclass(frozen=True)
class Lock:
    """Plans, and the overrides and versions that made them; `multirun`: as a grid."""

    schema: int
    fsdp_lab: str
    torch: str
    multirun: bool
    overrides: list[str]
    plans: list[StepPlan]


def lock_of(plans: list[StepPlan], overrides: list[str], multirun: bool) -> Lock:
    """Return the lock of plans that were made now."""
    return Lock(SCHEMA, fsdp_lab.__version__, torch_version(), multirun, overrides, plans)


class Change(NamedTuple):
    """A difference: its bytes per step, its share, and the cause."""

    bytes: float
    relative: float
    text: str


def write_lock(file: Path, lock: Lock) -> None:
    """Write a lock, with a line for each unit, collective and tensor. Raises OSError."""
    write_text(file, f"{_lines(asdict(lock))}\n")


def _lines(value: Any, indent: int = 0) -> str:
    """Return JSON in which only lists, and objects with lists, use several lines."""
    items = [*value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    if not items or not (isinstance(value, list) or any(isinstance(one, list) for one in items)):
        return json.dumps(value, ensure_ascii=False)
    names = [f"{json.dumps(name)}: " for name in value] if isinstance(value, dict) else [""] * len(items)
    parts = [f"{name}{_lines(one, indent + 1)}" for name, one in zip(names, items, strict=True)]
    start, end = "[]" if isinstance(value, list) else "{}"
    pad = "\n" + " " * indent
    return f"{start}{pad} {f',{pad} '.join(parts)}{pad}{end}"


def read_lock(file: Path) -> Lock:
    """Return a lock.

    Raises:
        UserError: there is none, it is damaged, or it has another schema or is of a newer version.
    """
    with suppress(OSError, UnicodeDecodeError):  # which `read_object` reports
        if "\n<<<<<<< " in file.read_text():
            raise UserError(
                f"{file} has conflict markers of git; take one side (git checkout --ours {file}), then write it again "
                f"with lock={file}, which keeps its overrides."
            )
    content = read_object(file, _REMEDY.format(file=file))
    if content is None:
        raise UserError(
            f"{file}: there is no such file; write it with lock={file}. The same command needs "
            "the model, its settings and cluster.num_workers: python -m fsdp_lab.plan --help."
        )
    schema, by = content.get("schema"), str(content.get("fsdp_lab"))
    if schema != SCHEMA or _version(by) > _version(fsdp_lab.__version__):
        raise UserError(
            f"{file} has schema {schema} of fsdp_lab {by}, and this is schema {SCHEMA} of fsdp_lab "
            f"{fsdp_lab.__version__}; use that version, or remove the file and write it again with lock={file}."
        )
    try:
        if not all(0 <= number <= _LARGEST for number in _numbers(content)):
            raise ConfigError("a figure is negative, or no number")
        lock = from_dict(Lock, content)
        for names in ([plan.setting for plan in lock.plans], *([unit.unit for unit in p.units] for p in lock.plans)):
            if len(set(names)) < len(names):
                raise ConfigError("a setting or a unit is there twice")
        return lock
    except (ConfigError, TypeError) as error:
        raise UserError(f"{file} is damaged ({error}); {_REMEDY.format(file=file)}.") from None


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _numbers(one)
    elif isinstance(value, int | float):
        yield value


def _version(text: str) -> list[int]:
    """Return the numbers of a version; text that is no version counts as newer than all."""
    return [int(part) for part in text.split(".") if part.isdecimal()] or [sys.maxsize]


def origins(before: Lock, after: Lock) -> list[str]:
    """Return the differences between the overrides and versions of two locks."""
    old, new = ({key_of(word): word.partition("=")[2] for word in lock.overrides} for lock in (before, after))
    old |= {"torch": before.torch, "fsdp_lab": before.fsdp_lab}
    new |= {"torch": after.torch, "fsdp_lab": after.fsdp_lab}
    keys = [key for key in dict.fromkeys([*new, *old]) if old.get(key) != new.get(key)]
    was = {key: f"{key}={new[key]} was {old.get(key, 'not set')}" for key in new}
    return [was.get(key, f"{key}={old.get(key)} is no longer set") for key in keys]


def changes(before: Lock, after: Lock, allowed: Mapping[str, float] = TOLERANCES) -> list[str]:
    """Return one line per change with its cause, the largest first: by bytes, then by shares.

    Args:
        allowed: see `TOLERANCES`.
    """
    old, new = ({plan.setting: plan for plan in lock.plans} for lock in (before, after))
    found = []
    for setting in dict.fromkeys([*old, *new]):
        start = f"{setting}: " if setting else ""
        if setting in old and setting in new:
            some = [*_changes(old[setting], new[setting], allowed)]
            some = some or [*_details(old[setting], new[setting], allowed)]
            found += [one._replace(text=start + one.text) for one in some]
        else:
            found.append(Change(inf, inf, f"{start}{'is new' if setting in new else 'is no longer planned'}"))
    return [change.text for change in sorted(found, key=lambda change: (-change.bytes, -change.relative))]


def _changes(before: StepPlan, after: StepPlan, allowed: Mapping[str, float]) -> Iterator[Change]:
    for name, old, new in (("workers", before.workers, after.workers), ("device", before.device, after.device)):
        if old != new:
            yield Change(0, inf, f"{name}: {old} → {new}")
    yield from _unit_changes(before, after, allowed["plan.units"])
    yield from _sent_changes(before, after, allowed["plan.sent"])
    yield from _flops_changes(before, after, allowed["plan.flops"])
    yield from _peak_changes(before, after, allowed["plan.peak"])
    was, now = (plan.time.ms if plan.time else 0 for plan in (before, after))
    if _relative(was, now) > allowed["plan.step"]:
        why = f": {after.no_time}" if after.no_time else ""
        old, new = (f"{four_digits(ms)} ms" if ms else "unknown" for ms in (was, now))
        share = f" ({_percent(was, now)})" if was and now else ""
        yield Change(0, _relative(was, now), f"predicted step {old} → {new}{share}{why}")


def _details(before: StepPlan, after: StepPlan, allowed: Mapping[str, float]) -> Iterator[Change]:
    covered = {name for key, names in _COVERED.items() if allowed[key] for name in names}
    names = [each.name for each in fields(StepPlan) if each.name not in covered]
    if other := [name for name in names if getattr(before, name) != getattr(after, name)]:
        yield Change(0, 0, f"lines of {', '.join(other)} differ, and no sum does")


def _unit_changes(before: StepPlan, after: StepPlan, allowed: float) -> Iterator[Change]:
    old, new = ({row.unit: row for row in plan.units} for plan in (before, after))
    for name in (name for name in old if name in new):
        was, now = old[name], new[name]
        if was.count != now.count:
            size = abs(now.count - was.count) * now.gathered
            yield Change(size, _relative(was.count, now.count), f"{name}: {was.count} → {count(now.count, 'unit')}")
        for what, a, b in (("gathered", was.gathered, now.gathered), ("sharded", was.sharded, now.sharded)):
            if _relative(a, b) > allowed:
                text = f"{what} bytes of {name}: {_pair(a, b)} ({_why(was, now, what)})"
                yield Change(abs(b - a) * now.count, _relative(a, b), text)
                break
        if was.trained != now.trained and was.count * was.parameters == now.count * now.parameters:
            text = f"{name}: {was.trained:,} → {now.trained:,} of {now.count * now.parameters:,} parameters are trained"
            yield Change(0, _relative(was.trained, now.trained), text)
    gone, come = ([row for name, row in one.items() if name not in other] for one, other in ((old, new), (new, old)))
    for row in gone:
        related = [one for one in come if _is_inside(one.unit, row.unit) or _is_inside(row.unit, one.unit)]
        into = _listed([_unit_text(one) for one in related]) or f"part of {ROOT}"
        yield Change(row.count * row.gathered, 1, f"units: {_unit_text(row)} became {into}")
    for row in come:
        if not any(_is_inside(row.unit, one.unit) or _is_inside(one.unit, row.unit) for one in gone):
            yield Change(row.count * row.gathered, 1, f"units: {_unit_text(row)} came out of {ROOT}")


def _is_inside(unit: str, outer: str) -> bool:
    """Return whether a unit has only modules of another one, or parts of these."""
    names, around = (pattern(one).split(", ") for one in (unit, outer))
    return all(any(f"{name}.".startswith(f"{each}.") for each in around) for name in names)


def _unit_text(row: Unit) -> str:
    return f"{row.unit} ({row.count} of {size_text(row.gathered or row.sharded)})"


def _why(was: Unit, now: Unit, what: str) -> str:
    old, new = ((row.dtype if what == "gathered" else row.stored) for row in (was, now))
    if old and new and old != new:
        return f"{new} was {old}"
    if was.parameters != now.parameters:
        return f"{was.parameters:,} → {now.parameters:,} parameters"
    if not was.gathered or not now.gathered:
        return "each rank had all of it" if now.gathered else "each rank has all of it"
    return "over another number of ranks"


def _sent_changes(before: StepPlan, after: StepPlan, allowed: float) -> Iterator[Change]:
    """Yield changes of the collectives of a phase, with the units that cause them."""
    old, new = (_by(plan.collectives, lambda one: (one.phase, one.operation)) for plan in (before, after))
    for phase, operation in dict.fromkeys([*old, *new]):
        was, now = (one.get((phase, operation), []) for one in (old, new))
        (calls, a), (more, b) = _total(was), _total(now)
        groups, causes = [{one.group for one in some} for some in (was, now) if some], _causes(was, now)
        if groups[0] != groups[-1] or _relative(a, b) > allowed or (a == b and causes):
            times = f"{calls} → {more} calls" if calls != more else count(calls, "call")
            named = f": {_listed(causes)}" if causes else ""
            text = f"{operation} in {phase}: {times}, {_pair(a, b)}{named}"
            yield Change(abs(b - a), max(_relative(a, b), _relative(calls, more)), text)


def _causes(was: Sequence[Sent], now: Sequence[Sent]) -> list[str]:
    """Return how the collectives of units differ, the largest first."""
    old, new = (_by(some, lambda one: one.unit) for some in (was, now))
    causes = []
    for unit in dict.fromkeys([*old, *new]):
        before, after = old.get(unit, []), new.get(unit, [])
        (calls, a), (more, b) = _total(before), _total(after)
        words = [f"{calls} → {more} calls"] if calls != more else []
        for name in ("dtype", "group"):
            one, other = (", ".join(dict.fromkeys(getattr(each, name) for each in some)) for some in (before, after))
            words += [f"{other} was {one}"] if one and other and one != other else []
        if words or (a != b and unit != NO_UNIT):
            causes.append((abs(b - a), abs(more - calls), f"{unit} {', '.join(words) or _pair(a, b)}"))
    return [text for *_, text in sorted(causes, key=lambda cause: cause[:2], reverse=True)]


def _by(some: Iterable[Sent], key: Callable[[Sent], Any]) -> dict[Any, list[Sent]]:
    groups: dict[Any, list[Sent]] = {}
    for one in some:
        groups.setdefault(key(one), []).append(one)
    return groups


def _total(some: Sequence[Sent]) -> tuple[int, int]:
    """Return the calls and the bytes of collectives."""
    return sum(one.calls for one in some), sum(one.calls * one.bytes for one in some)


def _flops_changes(before: StepPlan, after: StepPlan, allowed: float) -> Iterator[Change]:
    old, new = (_flops(plan) for plan in (before, after))
    for work in after.flops:  # another type alone changes no sum
        total, of = old.get(key := (work.kind, work.phase)), [one for one in before.flops if one.dtype == work.dtype]
        was = sum(one.flops for one in of if (one.kind, one.phase) == key) / total if total else 0.0
        now = work.flops / new[key]
        if total and now - was > max(allowed, _SHARE):
            text = f"{work.kind} in {work.phase}: {_share(now)} of its FLOPs are {work.dtype}, {_share(was)} were"
            yield Change(0, now - was, f"{text} (now {work.modules})")
    for kind, phase in dict.fromkeys([*old, *new]):
        was, now = (one.get((kind, phase), 0) for one in (old, new))
        if _relative(was, now) > allowed:
            again = phase == "backward" and old.get((kind, "forward")) == new.get((kind, "forward"))
            less = "no longer computed again, or less is trained"
            how = less if now < was else "computed again, or more is trained"
            why = f": parts of the forward pass are {how}" if again else ""
            text = f"{kind} FLOPs in {phase}: {was:.4g} → {now:.4g} ({_percent(was, now)}){why}"
            yield Change(0, _relative(was, now), text)


def _flops(plan: StepPlan) -> dict[tuple[str, str], int]:
    """Return kind and phase -> FLOPs in all types."""
    sums = Counter[tuple[str, str]]()
    for work in plan.flops:
        sums[work.kind, work.phase] += work.flops
    return sums


def _share(value: float) -> str:
    return f"{value * 100:.3g} %"


def _peak_changes(before: StepPlan, after: StepPlan, allowed: float) -> Iterator[Change]:
    old, new = ({row.place: row for row in plan.peaks} for plan in (before, after))
    for place in dict.fromkeys([*old, *new]):
        was, now = (one[place].bytes if place in one else 0 for one in (old, new))
        if _relative(was, now) <= allowed:
            continue
        a, b = ({c.category: c.bytes for c in plan.categories if c.place == place} for plan in (before, after))
        moved = {name: b.get(name, 0) - a.get(name, 0) for name in (*a, *b)}
        up = 1 if now > was else -1
        first, *others = sorted(moved, key=lambda name: -up * moved[name]) or ["unknown"]
        moved.setdefault(first, now - was)
        some = [first]
        while others and (
            sum(moved[name] for name in some) * up < _EXPLAINED * abs(now - was)
            or (len(some) == 1 and 2 * up * moved[others[0]] > up * moved[first])
        ):
            some.append(others.pop(0))
        by = " and ".join(f"{name} {_signed(moved[name])}{_of_modules(before, after, place, name)}" for name in some)
        rest = now - was - sum(moved[name] for name in some)
        larger, row = (after, new[place]) if up > 0 else (before, old[place])
        unit = next((c.unit for c in larger.categories if (c.place, c.category) == (place, first)), "")
        named = (row.weights for row in larger.units if row.unit == unit and first not in _OF_NO_UNIT)
        of = next((f", unit {unit} ({weights})" for weights in named), "")
        name = "peak" if place == "device" else f"{place} peak"
        text = f"{name} {_pair(was, now)}: {by} {row.where}{of}{f'; all else {_signed(rest)}' if rest else ''}"
        yield Change(abs(now - was), _relative(was, now), text)


def _of_modules(before: StepPlan, after: StepPlan, place: str, category: str) -> str:
    """Return the modules that hold more or less of a category, in parentheses; "": none is known."""
    old, new = (
        {one.module: one.bytes for one in plan.modules if (one.place, one.category) == (place, category)}
        for plan in (before, after)
    )
    moved = {name: new.get(name, 0) - old.get(name, 0) for name in (*old, *new) if name != NO_UNIT}
    largest = sorted((name for name in moved if moved[name]), key=lambda name: -abs(moved[name]))
    return f" ({_listed([f'{name} {_signed(moved[name])}' for name in largest])})" if largest else ""


def figures(plan: StepPlan) -> dict[str, tuple[float, str]]:
    """Return what a table compares plans by: name -> value and text."""
    made: dict[str, tuple[float, str]] = {}
    if trained := sum(row.trained for row in plan.units):
        made["trained parameters"] = trained, f"{trained:,}"
    for row in plan.peaks:
        made["peak" if row.place == "device" else f"peak, {row.place}"] = row.bytes, size_text(row.bytes)
    for name in OPERATIONS.values():
        calls, total = _total([one for one in plan.collectives if one.operation == name])
        made |= {name: (total, f"{size_text(total)} in {count(calls, 'call')}")} if calls else {}
    for kind in dict.fromkeys(work.kind for work in plan.flops):
        flops = sum(work.flops for work in plan.flops if work.kind == kind)
        made[f"{kind} FLOPs"] = flops, f"{flops:.4g}"
    if (time := plan.time) is not None:
        text = " to ".join(four_digits(ms) for ms in (time.low_ms, time.high_ms))
        made["predicted step"] = time.ms, f"{four_digits(time.ms)} ms ({text})"
    return made


def compared(before: Lock, after: Lock) -> list[tuple[str, str, str, str]]:
    """Return the rows of a table of two locks: what, before, after, change."""
    rows = []
    plans = [{plan.setting: figures(plan) for plan in lock.plans} for lock in (before, after)]
    for setting in dict.fromkeys([*plans[0], *plans[1]]):
        old, new = (one.get(setting, {}) for one in plans)
        for name in dict.fromkeys([*old, *new]):
            (a, was), (b, now) = (one.get(name, (0, "-")) for one in (old, new))
            label = f"{setting}: {name}" if setting else name
            rows.append((label, was, now, _percent(a, b) if a and b and a != b else ""))
    return rows


def markdown(names: Sequence[str], before: Lock, after: Lock) -> str:
    """Return two locks compared, as a comment of a pull request."""
    because = "; ".join(f"`{text}`" for text in origins(before, after))
    table = [("", "before", "after", "change"), ("---",) * 4, *compared(before, after)]
    found = [f"- {text}" for text in changes(before, after)] or ["Nothing has changed."]
    of = f"predicted for one of {after.plans[0].workers:,} ranks with `{' '.join(after.overrides)}`"
    head = [f"**Plan of a step**, {of}: `{names[0]}` → `{names[1]}`", *([f"\n{because}"] if because else []), ""]
    return "\n".join([*head, *(f"| {' | '.join(row)} |" for row in table), "", *found])


def _relative(was: float, now: float) -> float:
    return 0.0 if was == now else abs(now - was) / was if was else inf


def _percent(was: float, now: float) -> str:
    if was and now >= 10 * was:
        return f"{now / was:,.0f}×"
    return f"{(now / was - 1) * 100:+.3g} %" if was else "new"


def _listed(texts: Sequence[str]) -> str:
    return ", ".join(texts[:_CAUSES]) + (f" and {len(texts) - _CAUSES} more" if len(texts) > _CAUSES else "")


def _scale(size: float) -> tuple[str, int]:
    return next(((unit, by) for unit, by in _SIZES.items() if size >= by), ("bytes", 1))


def size_text(size: float) -> str:
    """Return text such as `9.47 GiB`."""
    unit, by = _scale(size)
    return f"{size:,.0f} bytes" if by == 1 else f"{significant(size / by)} {unit}"


def _signed(size: float) -> str:
    return f"{'+' if size > 0 else '−'}{size_text(abs(size))}"


def _pair(was: float, now: float) -> str:
    """Return text such as `436 → 872 MiB`; in bytes if that shows no difference."""
    unit, by = _scale(max(was, now))
    old, new = (significant(size / by) for size in (was, now))
    if was == now:
        return size_text(was)
    return f"{was:,.0f} → {now:,.0f} bytes" if by == 1 or old == new else f"{old} → {new} {unit}"
