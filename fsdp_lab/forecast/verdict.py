"""A sentence on what was forecast: what fits and what does not, or what each setting needs. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from fsdp_lab.forecast.table import Row
from fsdp_lab.wording import significant

GIB, MIB = 2**30, 2**20
_CHECKPOINTING = "activation_checkpointing"
_PLAIN_WORDS = ("sharding", "precision")  # their values say by themselves what they are
_MOST = 4  # settings that a sentence names

Values = dict[str, str]


def verdict(rows: Sequence[Row], swept: Sequence[str], items: str = "samples") -> str:
    """Returns a sentence as `8 × 24 GiB, 64 images per GPU: everything except ddp fp32 (58 at most) fits`.

    Args:
        rows: the forecasts; those with an error are named as such.
        items: what a batch consists of.
    """
    having = [row for row in rows if not row.forecast.error]
    if not having:
        return "Nothing could be forecast."
    judged = [row for row in having if row.forecast.fits is not None]
    clauses = (
        [_fits(judged, swept), _tight(judged, swept), _takes(judged, swept)]
        if judged
        else [_needs(having, swept), _ask(having)]
    )
    if len(having) < len(rows):
        failed = _named([row for row in rows if row.forecast.error], rows, swept)
        clauses.append(f"no forecast of {_listed(map(_name, failed))}")
    told = "; ".join(clause for clause in clauses if clause)
    return f"{_where(having, items)}{';' if ':' in clauses[0] else ':'} {told}."


def _where(rows: Sequence[Row], items: str) -> str:
    capacities = {row.forecast.capacity_bytes for row in rows} - {None}
    kind = "GPU" if rows[0].forecast.cuda else "worker"
    workers = _span(row.forecast.num_workers for row in rows)
    size = f" × {_span(capacity / GIB for capacity in capacities if capacity)} GiB" if capacities else f" {kind}s"
    size = size.removesuffix("s") if size == f" {kind}s" and workers == "1" else size
    each = _span(row.microbatch for row in rows)
    return f"{workers}{size}, {each} {items.removesuffix('s') if each == '1' else items} per {kind}"


def _fits(rows: Sequence[Row], swept: Sequence[str]) -> str:
    fitting, others = [row for row in rows if row.forecast.fits], [row for row in rows if not row.forecast.fits]
    if not swept:
        needs = size_text(rows[0].forecast.needed_bytes)
        return f"it fits, it needs {needs}" if fitting else f"it does not fit{_at_most(rows)}, it needs {needs}"
    if not others:
        return "everything fits"
    if not fitting:
        if len({size_text(row.forecast.needed_bytes) for row in rows}) == 1:
            return f"nothing fits, {_needs(rows, swept)}"
        least = min(rows, key=lambda row: row.forecast.needed_bytes)
        return f"nothing fits, {_name(_values(least, swept))} needs least, {size_text(least.forecast.needed_bytes)}"
    those, these = _named(fitting, rows, swept), _named(others, rows, swept)
    if len(those) < len(these):
        return f"only {_listed(map(_name, those))} {'fits' if len(those) == 1 else 'fit'}"
    told = [_name(values) + _at_most([row for row in others if _has(row, values, swept)]) for values in these]
    return f"everything except {_listed(told)} fits"


def _tight(rows: Sequence[Row], swept: Sequence[str]) -> str:
    """What of the rest may run all the same."""
    tight = [row for row in rows if row.forecast.tight]
    if not tight:
        return ""
    who = _listed(map(_name, _named(tight, rows, swept))) if swept else "it"
    return f"{who} may run, slower: tight"


def _at_most(rows: Sequence[Row]) -> str:
    """How much of what does not fit would, where that was asked."""
    most = max(
        (row.forecast.largest_microbatch for row in rows if row.forecast.largest_microbatch is not None), default=-1
    )
    return "" if most < 0 else f" ({most:,} at most)" if most else " (not even one)"


def blocks_against_root(rows: Sequence[Row], swept: Sequence[str]) -> str:
    """Return that sharding=per_block does better than root, where by all forecasts of pairs that differ in nothing else
    it does: it needs less, and is faster where both have a speed. Else ""."""
    if "sharding" not in swept:
        return ""
    place = swept.index("sharding")
    by_rest: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows:
        rest = (*row.settings[:place], *row.settings[place + 1 :])
        by_rest.setdefault(rest, {})[row.settings[place]] = row
    both = [some for some in by_rest.values() if {"per_block", "root"} <= set(some)]
    pairs = [(some["per_block"].forecast, some["root"].forecast) for some in both]
    pairs = [(blocks, root) for blocks, root in pairs if not blocks.error and not root.error]
    if not pairs or any(blocks.needed_bytes >= root.needed_bytes for blocks, root in pairs):
        return ""
    speeds = [(blocks.speed, root.speed) for blocks, root in pairs if blocks.speed and root.speed]
    if any(blocks.samples_per_s < root.samples_per_s for blocks, root in speeds):
        return ""
    faster = " and should be at least as fast" if len(speeds) == len(pairs) else ""
    return f"sharding=per_block needs less memory than root{faster}, whatever else is set."


def _takes(rows: Sequence[Row], swept: Sequence[str]) -> str:
    """The setting that takes the most at once, and how much it would take with activation checkpointing."""
    asked = [row for row in rows if row.forecast.largest_microbatch is not None]
    if not asked:
        return "forecast.largest_microbatch=true finds the largest microbatch of each"
    plain = [row for row in asked if _values(row, swept).get(_CHECKPOINTING, "none") == "none"] or asked
    best = max(plain, key=_largest)
    if not _largest(best):
        return ""
    fewest = _fewest(best, plain, swept, lambda row: _largest(row) == _largest(best))
    told = {*fewest, *(_PLAIN_WORDS if fewest else ())} - {_CHECKPOINTING}
    values = {key: value for key, value in _values(best, swept).items() if key in told}
    text = f"{_name(values) if swept else 'it'} takes up to {_largest(best):,}"
    wanted = {**_values(best, swept), _CHECKPOINTING: "full"}
    with_it = [row for row in asked if row is not best and _values(row, swept) == wanted]
    return text + "".join(f", with checkpointing {_largest(row):,}" for row in with_it)


def _needs(rows: Sequence[Row], swept: Sequence[str]) -> str:
    """What each setting needs, the smallest first."""
    rows = sorted(rows, key=lambda row: row.forecast.needed_bytes)
    sizes = list(dict.fromkeys(size_text(row.forecast.needed_bytes) for row in rows))
    if not swept or len(sizes) == 1:
        return f"{'every setting' if swept else 'it'} needs {sizes[0]}"
    alike = ([row for row in rows if size_text(row.forecast.needed_bytes) == size] for size in sizes)
    named = [_listed(map(_name, _named(same, rows, swept))) for same in alike]
    if len(sizes) > _MOST:
        need = "need" if " and " in named[0] else "needs"
        return f"{named[0]} {need} the least, {sizes[0]}, {named[-1]} the most, {sizes[-1]}"
    kind = "GPU memory" if rows[0].forecast.cuda else "memory"
    told = [f"{name} {size}" for name, size in zip(named, sizes, strict=True)]
    return f"{kind} needed: {', '.join(told)}"


def _ask(rows: Sequence[Row]) -> str:
    """How to ask whether that fits."""
    device = "" if rows[0].forecast.cuda else "forecast.device=cuda "
    return f"with {device}forecast.capacity_gib=<GiB of your GPU> it says what fits"


def _named(some: Sequence[Row], rows: Sequence[Row], swept: Sequence[str]) -> list[Values]:
    """The fewest values that each name some of the rows, and none of the others, until all are named."""
    found: list[Values] = []
    for row in some:
        if not any(_has(row, values, swept) for values in found):
            found.append(_fewest(row, rows, swept, lambda other: other in some))
    return found


def _fewest(row: Row, rows: Sequence[Row], swept: Sequence[str], same: Callable[[Row], bool]) -> Values:
    """The values of a row without those that do not matter: all rows that have the rest are the same."""
    values = _values(row, swept)
    for key in reversed(swept):
        fewer = {name: value for name, value in values.items() if name != key}
        if all(same(other) for other in rows if _has(other, fewer, swept)):
            values = fewer
    return values


def _values(row: Row, swept: Sequence[str]) -> Values:
    return dict(zip(swept, row.settings, strict=True))


def _has(row: Row, values: Values, swept: Sequence[str]) -> bool:
    return values.items() <= _values(row, swept).items()


def named(row: Row, swept: Sequence[str]) -> str:
    """Return a setting by the values of the swept keys, as `per_block bf16_mixed offload=cpu`."""
    return _name(_values(row, swept))


def _name(values: Values) -> str:
    """As `ddp fp32 offload=cpu with checkpointing`."""
    words = [
        value if key in _PLAIN_WORDS else f"{key}={value}" for key, value in values.items() if key != _CHECKPOINTING
    ]
    if _CHECKPOINTING in values:
        mode = values[_CHECKPOINTING]
        kinds = {"none": "without checkpointing", "full": "with checkpointing"}
        words.append(kinds.get(mode, f"with {mode} checkpointing"))
    return " ".join(words) or "every setting"


def _listed(names: Iterable[str]) -> str:
    told = list(names)
    if len(told) > _MOST:
        told = [*told[: _MOST - 1], f"{len(told) - _MOST + 1} more"]
    return " and ".join([", ".join(told[:-1]), told[-1]] if len(told) > 1 else told)


def _largest(row: Row) -> int:
    return row.forecast.largest_microbatch or 0


def size_text(num_bytes: int) -> str:
    """Return bytes with three digits, as `10.9 GiB` or `33.0 MiB`."""
    return f"{significant(num_bytes / GIB)} GiB" if num_bytes >= GIB else f"{significant(num_bytes / MIB)} MiB"


def _span(numbers: Iterable[float]) -> str:
    low, *others = [f"{number:,.4g}" if number % 1 else f"{number:,.0f}" for number in sorted(set(numbers))]
    return f"{low} to {others[-1]}" if others else low
