"""What a sweep with `forecast.keep` would start of the forecast settings, by its own rule. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fsdp_lab.config import SweepConfig
from fsdp_lab.forecast.keep import passed_over, why_all
from fsdp_lab.forecast.run import Request
from fsdp_lab.forecast.table import Row
from fsdp_lab.forecast.verdict import named
from fsdp_lab.wording import count

_MOST_KEPT = 8


def kept_sentences(
    rows: Sequence[Row],
    requests: Sequence[Request],
    swept: Sequence[str],
    keep: str,
    effect: Callable[[SweepConfig, int], str],
) -> list[str]:
    """Return which trials a sweep with `forecast.keep` would start, in a sentence for each device.

    Args:
        rows: of each cell of the grid, as the table names it.
        requests: of each, in the same order.
        effect: returns, of a cell and its number of workers, what is equal for cells that are one trial of a sweep.
    """
    devices: dict[str, dict[str, tuple[Row, Request]]] = {}
    for row, request in zip(rows, requests, strict=True):
        trials = devices.setdefault(request.config.forecast.device, {})
        trials.setdefault(effect(request.config, request.num_workers), (row, request))
    found = []
    for device, trials in devices.items():
        where = f" with forecast.device={device}" if len(devices) > 1 else ""
        found.append(f"forecast.keep={keep}{where}: {_kept(list(trials.values()), swept, keep)}.")
    return found


def _kept(trials: Sequence[tuple[Row, Request]], swept: Sequence[str], keep: str) -> str:
    if all(request.sheet is None for _, request in trials):
        return "no speed is predicted here, and a sweep refuses the key without; name a device, or calibrate this one"
    forecasts = {number: row.forecast for number, (row, _) in enumerate(trials)}
    settings = {number: request.key for number, (_, request) in enumerate(trials)}
    left_out = passed_over(forecasts, settings, keep)
    if not left_out:
        return f"of {count(len(trials), 'trial')} {why_all(forecasts, settings, keep)}"
    kept = sorted((row for number, (row, _) in enumerate(trials) if number not in left_out), key=_pace)
    names = ", ".join(named(row, swept) for row in kept[:_MOST_KEPT])
    more = f" and {len(kept) - _MOST_KEPT} more" if len(kept) > _MOST_KEPT else ""
    alike = ""
    if (distinct := len(set(settings.values()))) < len(trials):
        alike = f", which have {count(distinct, 'setting')} that differ in speed"
    return f"a sweep would start {len(kept)} of {count(len(trials), 'trial')}{alike}: {names}{more}"


def _pace(row: Row) -> float:
    """Return the seconds that a sample takes; what has no speed comes last."""
    speed = row.forecast.speed
    return float("inf") if speed is None else 1 / speed.samples_per_s
