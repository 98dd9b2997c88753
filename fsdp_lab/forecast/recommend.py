"""Which of the forecast settings should be fastest, by the rules of a sweep's report. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_lab.forecast.table import Row
from fsdp_lab.forecast.verdict import GIB, named
from fsdp_lab.report.choice import departures
from fsdp_lab.report.texts import figures_text
from fsdp_lab.speed.device import Basis
from fsdp_lab.speed.predict import Speed

_TO_MEASURE = 3
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
    """Return sentences: which setting should be fastest, how sure that is, and which are worth measuring; none where no
    speed was predicted."""
    counts = sorted({row.forecast.num_workers for row in rows})
    if len(counts) > 1:  # more workers are faster together: the question is which setting to use with so many
        apart = {count: [row for row in rows if row.forecast.num_workers == count] for count in counts}
        each = {count: speed_verdict(some, swept, tolerance) for count, some in apart.items()}
        return [f"With {count:,} workers. {each[count][0]}" for count in counts if each[count]] + each[counts[-1]][1:2]
    ranked = recommend(rows, swept, tolerance)
    if not ranked:
        return ["No setting fits, so none is recommended."] if any(row.forecast.speed for row in rows) else []
    best, speed = ranked[0], _speed(ranked[0])
    name = named(best, swept) if swept else "it"
    needs = f"needs {best.forecast.needed_bytes / GIB:.3g} GiB"
    told = f"{name}: {_rate(speed, best)}, step {_seconds(speed)}, {needs}, bound by {_bounds(speed)}"
    of_what = " of what fits" if any(row.forecast.fits is False for row in rows) else ""
    head = f"Should be fastest{of_what}: {told}." if len(rows) > 1 else f"Predicted: {told.removeprefix('it: ')}."
    sentences = [head, _basis(speed)]
    slowest = speed.high_s / speed.samples
    close = [row for row in ranked[1:] if _speed(row).low_s / _speed(row).samples < slowest]
    if close:
        worth = ", ".join(named(row, swept) for row in [best, *close[: _TO_MEASURE - 1]])
        kind = "other setting is" if len(close) == 1 else "other settings are"
        sentences.append(f"{len(close)} {kind} within that error of it. Worth measuring: {worth}.")
    return sentences


def _speed(row: Row) -> Speed:
    assert row.forecast.speed is not None
    return row.forecast.speed


def _rate(speed: Speed, row: Row) -> str:
    """As `5,854 tokens/s per device, MFU 34 %`."""
    workers = row.forecast.num_workers
    if speed.tokens_per_s is not None:
        rate = f"{figures_text(speed.tokens_per_s / workers)} tokens/s per device"
    else:
        rate = f"{figures_text(speed.samples_per_s)} samples/s"
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
    return (
        f"Predicted for {speed.device} {_BASES[speed.basis]}: nine of ten predictions of this kind were within "
        f"{speed.error * 100:.2g} % of what was measured."
    )
