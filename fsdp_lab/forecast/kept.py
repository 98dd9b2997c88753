"""The trials that a sweep with `forecast.keep` would start, by its own rule. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fsdp_lab.config import SweepConfig
from fsdp_lab.forecast.capacity import Forecast
from fsdp_lab.forecast.keep import Place, Selection, passed_over, why_all
from fsdp_lab.forecast.recommend import recommended
from fsdp_lab.forecast.run import Request
from fsdp_lab.forecast.table import Row
from fsdp_lab.forecast.verdict import named
from fsdp_lab.record.reasons import Reason
from fsdp_lab.wording import count

_MOST_NAMED = 8

Effect = Callable[[SweepConfig, int], str]


@dataclass(frozen=True)
class _SweptTrial:
    """A trial of a sweep: its cells are the rows at these indices, equal except for keys without an effect on them."""

    places: list[int]
    row: Row
    request: Request


@dataclass(frozen=True)
class _Asked:
    """The arguments of `Selection`."""

    forecasts: dict[int, Forecast]
    settings: dict[int, str]
    keep: str
    recommended: set[str]

    @property
    def left_out(self) -> dict[int, Reason]:
        return passed_over(self.forecasts, self.settings, self.keep, recommended=self.recommended)


def kept_rows(
    rows: Sequence[Row], requests: Sequence[Request], swept: Sequence[str], keep: str, effect: Effect
) -> list[Row]:
    """Return the rows with `kept`: whether a sweep would start them; see `kept_sentences`."""
    marked = list(rows)
    for trials in _ranked_together(rows, requests, effect).values():
        if (asked := _asked(trials, swept, keep)) is None:
            continue
        left_out = asked.left_out
        for number, trial in enumerate(trials):
            for place in trial.places:
                marked[place] = replace(rows[place], kept=number not in left_out)
    return marked


def kept_sentences(
    rows: Sequence[Row], requests: Sequence[Request], swept: Sequence[str], keep: str, effect: Effect
) -> list[str]:
    """Return the trials that a sweep with `forecast.keep` would start, a sentence per device and number of workers.

    Args:
        rows: of each cell of the grid, as the table names it.
        requests: of each, in the same order.
        swept: the keys that differ.
        keep: the value of the key.
        effect: returns, for a cell and its number of workers, a value that is equal for cells that are one trial.
    """
    groups = _ranked_together(rows, requests, effect)
    devices, workers = ({group[part] for group in groups} for part in (0, 1))
    sentences = []
    for (device, many), trials in groups.items():
        where = f" with forecast.device={device}" if len(devices) > 1 else ""
        where += f", {many:,} workers" if len(workers) > 1 else ""
        sentences.append(f"forecast.keep={keep}{where}: {_kept(trials, swept, keep)}.")
    return sentences


def _ranked_together(
    rows: Sequence[Row], requests: Sequence[Request], effect: Effect
) -> dict[tuple[str, int], list[_SweptTrial]]:
    """Return the trials of a sweep on each device, with each number of workers."""
    groups: dict[tuple[str, int], dict[str, _SweptTrial]] = {}
    for place, (row, request) in enumerate(zip(rows, requests, strict=True)):
        trials = groups.setdefault((request.config.forecast.device, request.num_workers), {})
        trials.setdefault(effect(request.config, request.num_workers), _SweptTrial([], row, request)).places.append(
            place
        )
    return {group: list(trials.values()) for group, trials in groups.items()}


def _asked(trials: Sequence[_SweptTrial], swept: Sequence[str], keep: str) -> _Asked | None:
    """Return the selection; None if no speed is predicted, in which case a sweep refuses the key."""
    if all(trial.request.sheet is None for trial in trials):
        return None
    tolerance = trials[0].request.config.report.speed_tolerance
    best = recommended([trial.row for trial in trials], swept, tolerance)
    return _Asked(
        {number: trial.row.forecast for number, trial in enumerate(trials)},
        {number: trial.request.key for number, trial in enumerate(trials)},
        keep,
        {trial.request.key for trial in trials if any(trial.row is row for row in best)},
    )


def _kept(trials: Sequence[_SweptTrial], swept: Sequence[str], keep: str) -> str:
    if (asked := _asked(trials, swept, keep)) is None:
        return "a sweep needs predicted speeds, and there are none; set forecast.device, or calibrate this machine"
    forecasts, settings = asked.forecasts, asked.settings
    if not asked.left_out:
        why = why_all(forecasts, settings, keep, recommended=asked.recommended)
        return f"{count(len(trials), 'trial')}, {why}"
    selection = Selection(forecasts, settings, keep, recommended=asked.recommended)
    by_place: dict[Place, list[int]] = {}
    for number in sorted(forecasts, key=lambda number: _pace(trials[number].row)):
        by_place.setdefault(selection.place(number), []).append(number)
    left_out = len(by_place.get(Place.slower, [])) + len(by_place.get(Place.no_room, []))
    alike = ""
    if (distinct := len(set(settings.values()))) < len(trials):
        alike = f", with {count(distinct, 'setting')} that differ in speed"

    def names(place: Place) -> str:
        texts = [named(trials[number].row, swept) for number in by_place[place]]
        more = f" and {len(texts) - _MOST_NAMED} more" if len(texts) > _MOST_NAMED else ""
        return f"{', '.join(texts[:_MOST_NAMED])}{more}"

    clauses = [clause for place in Place if (clause := _clause(place, by_place, selection, names))]
    head = f"a sweep would start {len(trials) - left_out} of {count(len(trials), 'trial')}{alike}"
    return f"{head} (`kept` in the table): {'; '.join(clauses)}"


def _clause(place: Place, by_place: dict[Place, list[int]], selection: Selection, names: Callable[[Place], str]) -> str:
    """Return why the trials in one place are kept, or not; "" for no trials."""
    numbers = by_place.get(place, [])
    if not numbers:
        return ""
    how_many = len(numbers)
    match place:
        case Place.fastest:
            return f"the {'' if how_many == 1 else f'{how_many} '}predicted fastest ({names(place)})"
        case Place.close:
            return f"{how_many} more that may be as fast as the last of these, because {selection.how_sure(numbers)}"
        case Place.recommended:
            return f"the recommended one ({names(place)})"
        case Place.of_batch:
            return f"the fastest of each other training.global_batch_size ({names(place)})"
        case Place.unknown:
            return f"{how_many} without a prediction ({names(place)})"
        case Place.slower:
            return f"it would skip {how_many} that {'is' if how_many == 1 else 'are'} slower by more than the error"
        case _:
            return f"it would skip {how_many} that cannot fit"


def _pace(row: Row) -> float:
    """Return the seconds of a sample; infinite without a speed."""
    speed = row.forecast.speed
    return float("inf") if speed is None else 1 / speed.samples_per_s
