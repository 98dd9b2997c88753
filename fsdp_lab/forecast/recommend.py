"""The forecast setting that should be fastest, and what may be as fast. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from fsdp_lab.forecast.keep import Predicted
from fsdp_lab.forecast.speed_texts import basis_text, bounds_text, rate_text, room_text, seconds_text, speed_of
from fsdp_lab.forecast.table import Row
from fsdp_lab.forecast.verdict import named, size_text
from fsdp_lab.report.choice import SAME_MEMORY, departures, smallest
from fsdp_lab.speed.predict import Speed

_MOST_LISTED = 3
_EQUAL = 0.0005  # as a share of a speed: predictions that differ by less are the same
_CONDITIONS = ("cluster.num_workers", "forecast.device", "training.global_batch_size")  # each has its own answer

Group = tuple[str, int, int]  # device, number of workers, global batch size


def recommend(rows: Sequence[Row], swept: Sequence[str], tolerance: float) -> list[Row]:
    """Return the settings that fit and have a speed, the recommended one first, the others by their predicted speed.

    The fastest is recommended. Only if it nearly fills its GPU, memory decides among the settings within the tolerance:
    the least wins, and of those that need hardly more, the simplest. A setting whose error is known goes before any
    other of these. Settings with equal predictions are ranked by the same rules. A setting that may fit counts as
    fitting, and if the capacity is not known, everything does.

    Args:
        rows: the forecasts.
        swept: the keys that differ.
        tolerance: a share of the highest speed: `report.speed_tolerance`.
    """
    fitting = [row for row in rows if row.forecast.speed and not row.forecast.error and row.forecast.fits is not False]
    fitting.sort(key=_pace)
    if not fitting:
        return []
    given_up = max(tolerance, _EQUAL) if fitting[0].forecast.nearly_full else _EQUAL
    limit = _speed(fitting[0]).samples_per_s * (1 - given_up)
    equal = [row for row in fitting if _speed(row).samples_per_s >= limit]
    small = [equal[place] for place in smallest([row.forecast.needed_bytes for row in equal])]
    best = min(small, key=lambda row: (_unlike(row), _departures(row, swept), row.forecast.needed_bytes))
    return [best, *(row for row in fitting if row is not best)]


def recommended(rows: Sequence[Row], swept: Sequence[str], tolerance: float) -> list[Row]:
    """Return the recommended setting of each device, number of workers and global batch size."""
    answers = (recommend(some, swept, tolerance)[:1] for some in _groups(rows).values())
    return [row for answer in answers for row in answer]


def _groups(rows: Sequence[Row]) -> dict[Group, list[Row]]:
    groups: dict[Group, list[Row]] = {}
    for row in rows:
        if row.forecast.speed is not None:
            group = row.forecast.speed.device, row.forecast.num_workers, row.forecast.speed.samples
            groups.setdefault(group, []).append(row)
    return groups


def _unlike(row: Row) -> bool:
    """Whether the error of its prediction is not known, for nothing like it was measured."""
    speed = _speed(row)
    return bool(speed.unlike) or speed.bound_unseen


def _departures(row: Row, swept: Sequence[str]) -> list[bool]:
    return departures(dict(zip(swept, row.settings, strict=True)))


def speed_verdict(
    rows: Sequence[Row], swept: Sequence[str], tolerance: float, remedies: Sequence[str] = ()
) -> list[str]:
    """Return sentences: which setting should be fastest, how sure that is, and which may be as fast.

    Each device, number of workers and global batch size has its own answer. The basis of the speeds is named once. The
    list is empty without a speed.

    Args:
        rows: the forecasts.
        swept: the keys that differ.
        tolerance: see `recommend`.
        remedies: overrides that leave more room on a GPU, to try first if one is nearly full.
    """
    groups = _groups(rows)
    sentences: list[str] = []
    sizes = any(len(same) > 1 for same in _batches(groups).values())
    for group in sorted(groups):
        answer = _answer(groups[group], swept, tolerance, remedies)
        basis = [sentence for sentence in answer.basis if sentence not in sentences]
        sentences += [f"{_where(group, groups, sizes)}{answer.head}", *answer.room, *basis, *answer.others]
    return [*sentences, *_over_batches(groups, swept, tolerance), *_scaling(groups, swept, tolerance)]


def _where(group: Group, groups: Mapping[Group, Sequence[Row]], sizes: bool) -> str:
    """Return the group that an answer is about; "" for a single group."""
    device, workers, batch = group
    conditions = [f"{workers:,} × {device}"] if len({other[:2] for other in groups}) > 1 else []
    conditions += [f"training.global_batch_size={batch}"] if sizes else []
    return f"{', '.join(conditions)}. " if conditions else ""


class _Answer(NamedTuple):
    """Sentences of one group.

    Attributes:
        head: what is recommended.
        room: how full its GPU is.
        basis: what the speeds are based on.
        others: which others may be as fast or are tight.
    """

    head: str
    room: Sequence[str] = ()
    basis: Sequence[str] = ()
    others: Sequence[str] = ()


def _answer(rows: Sequence[Row], swept: Sequence[str], tolerance: float, remedies: Sequence[str]) -> _Answer:
    keys = [place for place, key in enumerate(swept) if key not in _CONDITIONS or len({*_values(rows, place)}) > 1]
    names = [swept[place] for place in keys]
    rows = [replace(row, settings=[row.settings[place] for place in keys]) for row in rows]
    ranked = recommend(rows, names, tolerance)
    if not ranked:
        return _Answer("No setting fits, so none is recommended.")
    best, speed = ranked[0], _speed(ranked[0])
    mine = Predicted.of(speed)
    room = [*_may_not_fit(ranked, names), *_room(ranked, names, remedies)]
    close = [row for row in ranked[1:] if Predicted.of(_speed(row)).may_reach(mine)]
    faster = [r for r in rows if r.forecast.tight and r.forecast.speed and _pace(r) < _pace(best)]
    others = [_may_be_as_fast(best, close, names)] if close else []
    others += [_tight(sorted(faster, key=_pace), names)] if faster else []
    return _Answer(_head(rows, ranked, names), room, [basis_text(speed)], others)


def _head(rows: Sequence[Row], ranked: Sequence[Row], swept: Sequence[str]) -> str:
    """Return what is recommended, and what is faster if that nearly fills its GPU."""
    best, fastest = ranked[0], min(ranked, key=_pace)
    figures = f"{_figures(best)}, bound by {bounds_text(_speed(best))}"
    if len(rows) == 1:
        return f"Predicted: {figures}."
    of_what = ""
    if any(row.forecast.fits is False for row in rows):
        of_what = " that may fit" if best.forecast.may_fit else " that fits"
    if _ratio(fastest, best) <= _EQUAL:
        return f"Predicted fastest{of_what}: {named(best, swept)}: {figures}."
    percent = f"{_ratio(fastest, best) * 100:.2g} %"
    return (
        f"Recommended: {named(best, swept)}: {figures}. Predicted fastest{of_what}: {named(fastest, swept)}, by "
        f"{percent}: {_figures(fastest)}. {room_text(fastest.forecast)}"
    )


def _ratio(row: Row, other: Row) -> float:
    """Return by how much a speed exceeds another, as a share of the other."""
    return _speed(row).samples_per_s / _speed(other).samples_per_s - 1


def _figures(row: Row) -> str:
    """Return text such as `5,854 tokens/s per device, MFU 34 %, step 2.88 s (2.5 to 3.39), needs 68.7 GiB`."""
    needs = f"needs {size_text(row.forecast.needed_bytes)}"
    return f"{rate_text(row.forecast)}, step {seconds_text(_speed(row))}, {needs}"


def _may_not_fit(ranked: Sequence[Row], swept: Sequence[str]) -> list[str]:
    """Return that only an upper bound is known of what the recommended setting needs, and the fastest that fits."""
    best, *others = ranked
    forecast = best.forecast
    if not forecast.may_fit:
        return []
    needs = size_text(forecast.needed_bytes)
    sentence = f"Whether it fits is not known: {needs} is an upper bound ({forecast.upper_bound})."
    sure = next((row for row in others if row.forecast.fits), None)
    return [sentence if sure is None else f"{sentence} The fastest that fits: {named(sure, swept)}: {_figures(sure)}."]


def _room(ranked: Sequence[Row], swept: Sequence[str], remedies: Sequence[str]) -> list[str]:
    """Return sentences for a recommended setting that nearly fills its GPU.

    They name the consequence, what to try first, and the fastest setting that leaves room.
    """
    best, *others = ranked
    if best.forecast.may_fit or not (sentence := room_text(best.forecast)):
        return []
    if remedies:
        these = "it" if len(remedies) == 1 else "them"
        sentence += f" Try {' or '.join(remedies)} first: this grid does not vary {these}."
    roomy = next((row for row in others if not row.forecast.nearly_full), None)
    if roomy is not None:
        return [f"{sentence} The fastest setting that leaves room: {named(roomy, swept)}: {_figures(roomy)}."]
    return [f"{sentence} No other setting leaves more room." if others else sentence]


def _tight(faster: Sequence[Row], swept: Sequence[str]) -> str:
    more = f" and {len(faster) - _MOST_LISTED} more" if len(faster) > _MOST_LISTED else ""
    names = ", ".join(named(row, swept) for row in faster[:_MOST_LISTED])
    return (
        f"Predicted faster, but tight: {names}{more}. When memory is short, the allocator frees and retries, which "
        "predictions do not include."
    )


def _pace(row: Row) -> float:
    """Return the seconds that a sample takes."""
    return 1 / _speed(row).samples_per_s


def _may_be_as_fast(best: Row, close: Sequence[Row], swept: Sequence[str]) -> str:
    """Return a sentence about settings that may be as fast.

    Such as `2 other settings may be as fast: ddp (predicted 3 % slower), root (predicted equal). Their ranges overlap.`
    If the error of ratios is known: `The predicted ratio of two settings has an error of up to ±8 %.`
    """

    def describe(row: Row) -> str:
        ratio = _ratio(row, best)
        if abs(ratio) <= _EQUAL:
            return f"{named(row, swept)} (predicted equal)"
        return f"{named(row, swept)} (predicted {abs(ratio) * 100:.2g} % {'faster' if ratio > 0 else 'slower'})"

    which = "One other setting" if len(close) == 1 else f"{len(close)} other settings"
    more = f" and {len(close) - _MOST_LISTED} more" if len(close) > _MOST_LISTED else ""
    smaller = ""
    if _ratio(close[0], best) > _EQUAL:
        smaller = f" {_why_slower(best, close, swept)}"
    ratios = [Predicted.of(_speed(row)).ratio_error(Predicted.of(_speed(best))) for row in close]
    sure = [ratio for ratio in ratios if ratio is not None]
    why = (
        f"The predicted ratio of two settings has an error of up to ±{max(sure) * 100:.2g} %."
        if len(sure) == len(close)
        else "Their ranges overlap."
    )
    return f"{which} may be as fast: {', '.join(map(describe, close[:_MOST_LISTED]))}{more}. {why}{smaller}"


def _why_slower(best: Row, close: Sequence[Row], swept: Sequence[str]) -> str:
    """Return why it is recommended although another within the tolerance is faster: memory is scarce."""
    faster = [row for row in close if _pace(row) < _pace(best)]
    needs = best.forecast.needed_bytes
    rivals = [row for row in faster if row.forecast.needed_bytes < needs * (1 + SAME_MEMORY)]
    reason = "The recommended setting needs the least memory of those within report.speed_tolerance"
    if not rivals:
        return f"{reason}."
    if not _unlike(best) and any(map(_unlike, rivals)):
        return f"{reason} (to within {SAME_MEMORY:.0%}), and the error of its prediction is known."
    plainest = all(_departures(best, swept) < _departures(row, swept) for row in rivals)
    return f"{reason} (to within {SAME_MEMORY:.0%}){', and is the simplest' if plainest else ''}."


def _batches(groups: Mapping[Group, Sequence[Row]]) -> dict[tuple[str, int], list[int]]:
    """Return the global batch sizes of each device and number of workers."""
    sizes: dict[tuple[str, int], list[int]] = {}
    for device, workers, batch in sorted(groups):
        sizes.setdefault((device, workers), []).append(batch)
    return sizes


def _over_batches(groups: Mapping[Group, Sequence[Row]], swept: Sequence[str], tolerance: float) -> list[str]:
    """Return which global batch size yields the most samples/s, if a device and number of workers has several."""
    sentences = []
    several = {place: sizes for place, sizes in _batches(groups).items() if len(sizes) > 1}
    for (device, workers), sizes in several.items():
        best = [row for size in sizes for row in recommend(groups[device, workers, size], swept, tolerance)[:1]]
        if best:
            most = min(best, key=_pace)
            where = f"{workers:,} × {device}: " if len(several) > 1 else ""
            sentences.append(
                f"{where}training.global_batch_size={_speed(most).samples} is predicted fastest, "
                f"{rate_text(most.forecast)}. How much is learned from a sample may depend on the batch size, so each "
                "size has its own answer."
            )
    return sentences


def _scaling(groups: Mapping[Group, Sequence[Row]], swept: Sequence[str], tolerance: float) -> list[str]:
    """Return the predicted gain of the largest number of workers, for each device."""
    apart: dict[tuple[str, int], list[Row]] = {}
    for (device, workers, _), rows in groups.items():
        apart.setdefault((device, workers), []).extend(rows)
    sentences = []
    for device in sorted({device for device, _ in apart}):
        counts = sorted(count for other, count in apart if other == device)
        few, many = (recommend(apart[device, count], swept, tolerance) for count in (counts[0], counts[-1]))
        if len(counts) > 1 and few and many:
            best, names = many[0], [key for key in swept if key not in _CONDITIONS]
            same = _same_setting(best, few, swept)
            ratio = _items_per_s(_speed(best)) / _items_per_s(_speed(same or few[0]))
            head = f"{counts[-1]:,} instead of {counts[0]:,} × {device}: {ratio:.3g} times the total speed"
            mine, other = (_named_as(row, swept, names) for row in (best, same or few[0]))
            if same is None:
                sentences.append(f"{head}, with {mine} instead of {other} (the recommended setting of each).")
            else:
                sentences.append(f"{head}{f', both with {mine}' if names else ''}.")
    return sentences


def _same_setting(best: Row, others: Sequence[Row], swept: Sequence[str]) -> Row | None:
    """Return the same setting with another number of workers; None without one.

    First one with as many samples a worker, else with as many in all, else any.
    """

    def rest(row: Row) -> list[str]:
        return [value for key, value in zip(swept, row.settings, strict=True) if key not in _CONDITIONS]

    def how_unlike(row: Row) -> tuple[bool, bool]:
        mine, other = _speed(best).samples, _speed(row).samples
        each = mine * row.forecast.num_workers != other * best.forecast.num_workers
        return each and mine != other, each

    return min((row for row in others if rest(row) == rest(best)), key=how_unlike, default=None)


def _named_as(row: Row, swept: Sequence[str], names: Sequence[str]) -> str:
    return named(replace(row, settings=[row.settings[swept.index(key)] for key in names]), names)


def _items_per_s(speed: Speed) -> float:
    return speed.tokens_per_s or speed.samples_per_s


def _values(rows: Sequence[Row], place: int) -> list[str]:
    return [row.settings[place] for row in rows]


def _speed(row: Row) -> Speed:
    return speed_of(row.forecast)
