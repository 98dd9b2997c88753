"""The trials that a sweep with `forecast.keep` would start, by its own rule. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from fsdp_lab.config import SweepConfig
from fsdp_lab.forecast.answer import recommended
from fsdp_lab.forecast.keep import passed_over, why_all
from fsdp_lab.forecast.run import Request
from fsdp_lab.forecast.table import Row
from fsdp_lab.wording import count

Effect = Callable[[SweepConfig, int], str]


def kept_rows(
    rows: Sequence[Row], requests: Sequence[Request], swept: Sequence[str], keep: str, effect: Effect
) -> tuple[list[Row], list[str]]:
    """Return the rows with `kept`, and what a sweep would start: a sentence for each device and number of workers.

    Args:
        rows: of each cell of the grid.
        requests: of each, in the same order.
        swept: the keys that differ.
        keep: the value of `forecast.keep`.
        effect: returns, for a cell and its number of workers, a value that is equal for cells that are one trial.
    """
    groups: dict[tuple[str, int], dict[str, list[int]]] = {}
    for place, request in enumerate(requests):
        trials = groups.setdefault((request.config.forecast.device, request.num_workers), {})
        trials.setdefault(effect(request.config, request.num_workers), []).append(place)
    marked, sentences = list(rows), []
    for (device, workers), trials in groups.items():
        where = f" with forecast.device={device}" if len({device for device, _ in groups}) > 1 else ""
        where += f", {workers:,} workers" if len({workers for _, workers in groups}) > 1 else ""
        cells = list(trials.values())
        firsts = [places[0] for places in cells]
        if all(requests[place].sheet is None for place in firsts):  # a sweep refuses the key
            why = "a sweep needs predicted speeds, and there are none; set forecast.device, or calibrate this machine"
        else:
            some = [rows[place] for place in firsts]
            best = recommended(some, swept, requests[firsts[0]].config.report.speed_tolerance)
            keys = {number: requests[place].key for number, place in enumerate(firsts)}
            wanted = {keys[number] for number, row in enumerate(some) if any(row is one for one in best)}
            forecasts = {number: row.forecast for number, row in enumerate(some)}
            left_out = passed_over(forecasts, keys, keep, recommended=wanted)
            for number, places in enumerate(cells):
                for place in places:
                    marked[place] = replace(rows[place], kept=number not in left_out)
            starts = f"a sweep would start {len(some) - len(left_out)} of {count(len(some), 'trial')}"
            why = f"{starts} (`kept` in the table); the others cannot fit, or are slower by more than the error"
            if not left_out:
                why = f"{count(len(some), 'trial')}, {why_all(forecasts, keys, keep, recommended=wanted)}"
        sentences.append(f"forecast.keep={keep}{where}: {why}.")
    return marked, sentences
