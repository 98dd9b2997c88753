"""A sentence about a forecast: what fits and what does not, or the needs of each setting. Imports no torch."""

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
    """Return a sentence such as `8 × 24 GiB, 64 images per GPU: everything except ddp fp32 (58 at most) fits`.

    Args:
        rows: the forecasts; those with an error are named as such.
        swept: the keys that differ.
        items: the noun for the samples of a batch.
    """
    having = [row for row in rows if not row.forecast.error]
    if not having:
        return "Nothing could be forecast."
    judged = [row for row in having if row.forecast.fits is not None]
    clauses = (
        [_fits(judged, swept), _tight(judged, swept), _may_fit(having, swept), _takes(judged, swept)]
        if judged
        else [_needs(having, swept), _may_fit(having, swept) or _ask(having)]
    )
    if len(having) < len(rows):
        failed = _named([row for row in rows if row.forecast.error], rows, swept)
        clauses.append(f"no forecast for {_listed(map(name_of, failed))}")
    text = "; ".join(clause for clause in clauses if clause)
    return f"{_where(having, items)}{';' if ':' in clauses[0] else ':'} {text}."


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
        return f"it needs {needs} and fits" if fitting else f"it needs {needs} and does not fit{_at_most(rows)}"
    if not others:
        return "everything fits"
    if not fitting:
        if len({size_text(row.forecast.needed_bytes) for row in rows}) == 1:
            return f"nothing fits; {_needs(rows, swept)}"
        least = min(rows, key=lambda row: row.forecast.needed_bytes)
        size = size_text(least.forecast.needed_bytes)
        return f"nothing fits; {name_of(_values(least, swept))} needs the least, {size}"
    those, these = _named(fitting, rows, swept), _named(others, rows, swept)
    if len(those) < len(these):
        return f"only {_listed(map(name_of, those))} {'fits' if len(those) == 1 else 'fit'}"
    exceptions = [name_of(values) + _at_most([row for row in others if _has(row, values, swept)]) for values in these]
    return f"everything except {_listed(exceptions)} fits"


def _tight(rows: Sequence[Row], swept: Sequence[str]) -> str:
    """Return which of the rest may still run."""
    tight = [row for row in rows if row.forecast.tight]
    if not tight:
        return ""
    who = _listed(map(name_of, _named(tight, rows, swept))) if swept else "it"
    return f"{who} may run, but slower (tight)"


def _may_fit(rows: Sequence[Row], swept: Sequence[str]) -> str:
    """Return which settings only an upper bound keeps from fitting."""
    unknown = [row for row in rows if row.forecast.may_fit]
    if not unknown:
        return ""
    who = _listed(map(name_of, _named(unknown, rows, swept))) if swept else "it"
    why = _listed(dict.fromkeys(row.forecast.upper_bound for row in unknown))
    least = size_text(min(row.forecast.needed_bytes for row in unknown))
    most = "its" if len(unknown) == 1 else "their"
    return f"{who} may fit: {most} {least} {'is' if len(unknown) == 1 else 'or more are'} an upper bound ({why})"


def _at_most(rows: Sequence[Row]) -> str:
    """Return how large a microbatch would fit, if that was requested."""
    most = max(
        (row.forecast.largest_microbatch for row in rows if row.forecast.largest_microbatch is not None), default=-1
    )
    return "" if most < 0 else f" ({most:,} at most)" if most else " (not even one)"


def blocks_against_root(rows: Sequence[Row], swept: Sequence[str]) -> str:
    """Return that sharding=per_block does better than root; "" unless all forecasts show it.

    In all pairs that differ in nothing else, it needs less, and is faster if both have a speed.
    """
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
    faster = " and is predicted at least as fast" if len(speeds) == len(pairs) else ""
    return f"sharding=per_block needs less memory than root{faster}, whatever the other values."


def root_again(rows: Sequence[Row], swept: Sequence[str]) -> str:
    """Return why sharding=root needs more with reshard_after_forward=always than with never; "" if it does not."""
    if not {"sharding", "reshard_after_forward"} <= set(swept):
        return ""
    by_rest: dict[frozenset[tuple[str, str]], dict[str, Row]] = {}
    for row in rows:
        values = _values(row, swept)
        reshard = values.pop("reshard_after_forward")
        if values["sharding"] == "root" and not row.forecast.error:
            by_rest.setdefault(frozenset(values.items()), {})[reshard] = row
    both = [some for some in by_rest.values() if {"always", "never"} <= set(some)]
    # a buffer of some bytes is not worth a sentence
    higher = sum(some["always"].forecast.peak_bytes > 1.01 * some["never"].forecast.peak_bytes for some in both)
    if not higher:
        return ""
    pairs = f" in {higher} of {len(both)} pairs" if len(both) > 1 else ""
    return (
        f"sharding=root peaks higher with reshard_after_forward=always than with never{pairs}: the backward pass "
        "gathers the whole model again, and its buffer is in memory together with the activations."
    )


def _takes(rows: Sequence[Row], swept: Sequence[str]) -> str:
    """Return the setting with the largest microbatch, and its size with activation checkpointing."""
    asked = [row for row in rows if row.forecast.largest_microbatch is not None]
    if not asked:
        return "forecast.largest_microbatch=true finds the largest microbatch of each"
    without = [row for row in asked if _values(row, swept).get(_CHECKPOINTING, "none") == "none"]
    plain = without or asked
    best = max(plain, key=_largest)
    if not _largest(best):
        return ""
    fewest = _fewest(best, plain, swept, lambda row: _largest(row) == _largest(best))
    distinguishing = {*fewest, *(_PLAIN_WORDS if fewest else ())} - ({_CHECKPOINTING} if without else set())
    values = {key: value for key, value in _values(best, swept).items() if key in distinguishing}
    text = f"{name_of(values) if swept else 'it'} takes up to {_largest(best):,}"
    wanted = {**_values(best, swept), _CHECKPOINTING: "full"}
    with_it = [row for row in asked if row is not best and _values(row, swept) == wanted]
    return text + "".join(f", with {_CHECKPOINTING}=full {_largest(row):,}" for row in with_it)


def _needs(rows: Sequence[Row], swept: Sequence[str]) -> str:
    """Return what each setting needs, the smallest first."""
    rows = sorted(rows, key=lambda row: row.forecast.needed_bytes)
    sizes = list(dict.fromkeys(size_text(row.forecast.needed_bytes) for row in rows))
    if not swept or len(sizes) == 1:
        return f"{'every setting' if swept else 'it'} needs {sizes[0]}"
    alike = ([row for row in rows if size_text(row.forecast.needed_bytes) == size] for size in sizes)
    named = [_listed(map(name_of, _named(same, rows, swept))) for same in alike]
    if len(sizes) > _MOST:
        need = "need" if " and " in named[0] else "needs"
        return f"{named[0]} {need} the least, {sizes[0]}, {named[-1]} the most, {sizes[-1]}"
    kind = "GPU memory" if rows[0].forecast.cuda else "memory"
    needs = [f"{name} {size}" for name, size in zip(named, sizes, strict=True)]
    return f"{kind} needed: {', '.join(needs)}"


def _ask(rows: Sequence[Row]) -> str:
    """Return how to request whether it fits."""
    device = "" if rows[0].forecast.cuda else "forecast.device=cuda "
    return f"add {device}forecast.capacity_gib=<GiB of your GPU> to see what fits"


def _named(some: Sequence[Row], rows: Sequence[Row], swept: Sequence[str]) -> list[Values]:
    """Return the fewest values that each name some of the rows, and none of the others, until all are named."""
    named: list[Values] = []
    for row in some:
        if not any(_has(row, values, swept) for values in named):
            named.append(_fewest(row, rows, swept, lambda other: other in some))
    return named


def _fewest(row: Row, rows: Sequence[Row], swept: Sequence[str], same: Callable[[Row], bool]) -> Values:
    """Return the values of a row without those that do not matter: all rows that have the rest are the same."""
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
    return name_of(_values(row, swept))


def name_of(values: Values) -> str:
    """Return text such as `ddp fp32 offload=cpu activation_checkpointing=full`."""
    return (
        " ".join(value if key in _PLAIN_WORDS else f"{key}={value}" for key, value in values.items()) or "every setting"
    )


def _listed(names: Iterable[str]) -> str:
    shown = list(names)
    if len(shown) > _MOST:
        shown = [*shown[: _MOST - 1], f"{len(shown) - _MOST + 1} more"]
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def _largest(row: Row) -> int:
    return row.forecast.largest_microbatch or 0


def size_text(num_bytes: int) -> str:
    """Return bytes with three digits, as `10.9 GiB` or `33.0 MiB`."""
    return f"{significant(num_bytes / GIB)} GiB" if num_bytes >= GIB else f"{significant(num_bytes / MIB)} MiB"


def _span(numbers: Iterable[float]) -> str:
    low, *others = [f"{number:,.4g}" if number % 1 else f"{number:,.0f}" for number in sorted(set(numbers))]
    return f"{low} to {others[-1]}" if others else low
