"""Which of the forecast settings should be fastest, by the rules of a sweep's report. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fsdp_lab.forecast.keep import Predicted
from fsdp_lab.forecast.table import Row
from fsdp_lab.forecast.verdict import named, size_text
from fsdp_lab.report.choice import departures
from fsdp_lab.report.texts import figures_text
from fsdp_lab.speed.device import Basis
from fsdp_lab.speed.predict import Speed
from fsdp_lab.wording import count

_MOST_TOLD = 3
_CONDITIONS = ("cluster.num_workers", "forecast.device")  # of which each has an answer of its own
_BASES = {
    Basis.data_sheet: "from its data sheet",
    Basis.fitted: "with efficiencies fitted to published steps",
    Basis.calibration: "as calibrated",
}


def recommend(rows: Sequence[Row], swept: Sequence[str], tolerance: float) -> list[Row]:
    """Return what fits and has a speed, the recommended setting first, the others by their predicted speed.

    As in a report the fastest is recommended; of those within the tolerance of it the one that needs the least memory,
    and of equals the plainest. Where the capacity is not known, everything is taken to fit.

    Args:
        tolerance: a share of the highest speed: `report.speed_tolerance`.
    """
    fitting = [row for row in rows if row.forecast.speed and not row.forecast.error and row.forecast.fits is not False]
    fitting.sort(key=lambda row: -_speed(row).samples_per_s)
    if not fitting:
        return []
    limit = _speed(fitting[0]).samples_per_s * (1 - tolerance)
    equal = [row for row in fitting if _speed(row).samples_per_s >= limit]
    best = min(
        equal,
        key=lambda row: (row.forecast.needed_bytes, departures(dict(zip(swept, row.settings, strict=True)))),
    )
    return [best, *(row for row in fitting if row is not best)]


def speed_verdict(rows: Sequence[Row], swept: Sequence[str], tolerance: float) -> list[str]:
    """Return sentences: which setting should be fastest, how sure that is, and which may be as fast; none where no
    speed was predicted. Each number of workers and each device has an answer of its own."""
    apart: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        if row.forecast.speed is not None:
            apart.setdefault((row.forecast.speed.device, row.forecast.num_workers), []).append(row)
    if len(apart) < 2:
        return _answer(rows, swept, tolerance) if apart else []
    found = []
    for (device, workers), some in sorted(apart.items()):
        answer = _answer(some, swept, tolerance)
        found += [f"{workers:,} × {device}. {answer[0]}", *answer[1:]]
    return [*found, *_scaling(apart, swept, tolerance)]


def _answer(rows: Sequence[Row], swept: Sequence[str], tolerance: float) -> list[str]:
    keys = [place for place, key in enumerate(swept) if key not in _CONDITIONS or len({*_values(rows, place)}) > 1]
    names = [swept[place] for place in keys]
    rows = [replace(row, settings=[row.settings[place] for place in keys]) for row in rows]
    ranked = recommend(rows, names, tolerance)
    if not ranked:
        return ["No setting fits, so none is recommended."]
    best, speed = ranked[0], _speed(ranked[0])
    needs = f"needs {size_text(best.forecast.needed_bytes)}"
    told = f"{_rate(speed, best)}, step {_seconds(speed)}, {needs}, bound by {_bounds(speed)}"
    of_what = " of what fits" if any(row.forecast.fits is False for row in rows) else ""
    head = f"Should be fastest{of_what}: {named(best, names)}: {told}." if len(rows) > 1 else f"Predicted: {told}."
    mine = Predicted.of(speed)
    close = [row for row in ranked[1:] if Predicted.of(_speed(row)).may_reach(mine)]
    answer = [head, _basis(speed), *([_may_be_as_fast(best, close, names)] if close else [])]
    faster = [r for r in rows if r.forecast.tight and r.forecast.speed and _pace(r) < _pace(best)]
    return [*answer, *([_tight(sorted(faster, key=_pace), names)] if faster else [])]


def _tight(faster: Sequence[Row], swept: Sequence[str]) -> str:
    more = f" and {len(faster) - _MOST_TOLD} more" if len(faster) > _MOST_TOLD else ""
    names = ", ".join(named(row, swept) for row in faster[:_MOST_TOLD])
    return (
        f"Faster as predicted, but tight: {names}{more}. Where memory is short the allocator frees and retries, which "
        "no prediction counts."
    )


def _pace(row: Row) -> float:
    """Return the seconds that a sample takes."""
    return 1 / _speed(row).samples_per_s


def _may_be_as_fast(best: Row, close: Sequence[Row], swept: Sequence[str]) -> str:
    """As `2 other settings may be as fast, for the ranges overlap: ddp (3 % slower as predicted), root (the same).`
    Where the error of ratios is known: `for ratios of predictions are known to ±8 %`."""

    def told(row: Row) -> str:
        ratio = _speed(row).samples_per_s / _speed(best).samples_per_s - 1
        if abs(ratio) < 0.0005:
            return f"{named(row, swept)} (as fast as predicted)"
        return f"{named(row, swept)} ({abs(ratio) * 100:.2g} % {'faster' if ratio > 0 else 'slower'} as predicted)"

    which = "One other setting" if len(close) == 1 else f"{len(close)} other settings"
    more = f" and {len(close) - _MOST_TOLD} more" if len(close) > _MOST_TOLD else ""
    smaller = ""
    if _speed(close[0]).samples_per_s > _speed(best).samples_per_s:
        smaller = " The recommended one needs the least memory of those within report.speed_tolerance."
    ratios = [Predicted.of(_speed(row)).ratio_error(Predicted.of(_speed(best))) for row in close]
    sure = [ratio for ratio in ratios if ratio is not None]
    why = (
        f"ratios of predictions are known to ±{max(sure) * 100:.2g} %"
        if len(sure) == len(close)
        else "the ranges overlap"
    )
    return f"{which} may be as fast, for {why}: {', '.join(map(told, close[:_MOST_TOLD]))}{more}.{smaller}"


def _scaling(apart: Mapping[tuple[str, int], Sequence[Row]], swept: Sequence[str], tolerance: float) -> list[str]:
    """What the most workers would bring, of each device."""
    found = []
    for device in sorted({device for device, _ in apart}):
        counts = sorted(count for other, count in apart if other == device)
        few, many = (recommend(apart[device, count], swept, tolerance)[:1] for count in (counts[0], counts[-1]))
        if len(counts) > 1 and few and many:
            ratio = _items_per_s(_speed(many[0])) / _items_per_s(_speed(few[0]))
            found.append(f"{counts[-1]:,} instead of {counts[0]:,} × {device}: {ratio:.3g} times as fast together.")
    return found


def _items_per_s(speed: Speed) -> float:
    return speed.tokens_per_s or speed.samples_per_s


def _values(rows: Sequence[Row], place: int) -> list[str]:
    return [row.settings[place] for row in rows]


def _speed(row: Row) -> Speed:
    assert row.forecast.speed is not None
    return row.forecast.speed


def _rate(speed: Speed, row: Row) -> str:
    """As `5,854 tokens/s per device, MFU 34 %`."""
    workers = row.forecast.num_workers
    if speed.tokens_per_s is not None:
        rate = f"{figures_text(speed.tokens_per_s / workers)} tokens/s per device"
    else:
        rate = f"{figures_text(speed.samples_per_s / workers)} samples/s per device"
    return rate if speed.mfu is None else f"{rate}, MFU {speed.mfu * 100:.0f} %"


def _seconds(speed: Speed) -> str:
    if speed.step_s < 1:
        return f"{speed.step_s * 1e3:.3g} ms ({speed.low_s * 1e3:.3g} to {speed.high_s * 1e3:.3g})"
    return f"{speed.step_s:.3g} s ({speed.low_s:.3g} to {speed.high_s:.3g})"


def _bounds(speed: Speed) -> str:
    """As `compute (83 %) and gather (15 %)`: what bounds at least a tenth of the step."""
    shares = sorted(speed.shares.items(), key=lambda item: -item[1])
    told = [f"{name} ({share * 100:.0f} %)" for name, share in shares if share >= 0.1]
    return " and ".join(told) or speed.bound


def _basis(speed: Speed) -> str:
    by = _BASES.get(speed.basis) or f"as corrected by {count(speed.settings, 'setting')} that ran on it"
    if speed.bound_unseen:
        return (
            f"Predicted for {speed.device} {by}: launches bound {speed.shares['launch'] * 100:.0f} % of this step, and "
            "hardly anything of the steps that these figures were compared with. How far off it is is not known; the "
            f"range is {speed.error * 100:.2g} %, within which nine of ten predictions for another device were."
        )
    return (
        f"Predicted for {speed.device} {by}: nine of ten predictions of this kind were within "
        f"{speed.error * 100:.2g} % of what was measured."
    )
