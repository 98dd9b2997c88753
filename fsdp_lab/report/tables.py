"""The table of trials, of a large sweep the most important ones. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fsdp_lab.metrics import Metric, table_columns
from fsdp_lab.record.trial import TrialRecord
from fsdp_lab.report.answer import Answer
from fsdp_lab.report.data import SweepData
from fsdp_lab.report.recommend import Recommendation
from fsdp_lab.status import TrialStatus

MOST = 500  # trials; of more than these a table has so many, a picture so many points
MOST_DRAWN = 100  # in a picture of lines or bars


@dataclass(frozen=True)
class Cell:
    """A figure of a trial: as text, as it is, whether it is the best, and whether its timing is excluded."""

    text: str
    value: float | str
    best: bool
    excluded: bool


@dataclass(frozen=True)
class Row:
    """A trial: its number, its values and status, its figures; for the page also its run, filter words and colour."""

    number: int
    texts: list[str]
    cells: list[Cell]
    url: str
    words: str
    chosen: bool


@dataclass(frozen=True)
class Table:
    """A table and the notes below it."""

    heads: list[str]
    rows: list[Row]
    notes: list[str]


def trials_table(sweep: SweepData, answer: Answer) -> Table:
    """Return the trials with their figures. Those that decided come first: a phone shows only a few columns."""
    decided = [metric for metric, _ in answer.recommendation.axes]
    columns = [c for c in table_columns("report") if any(c.key in trial.figures for trial in sweep.trials)]
    columns.sort(key=lambda c: c.key not in decided)
    best = {column.key: _best(sweep, column) for column in columns}
    chosen = set(answer.setting.trials) if answer.setting else set()
    rows = [
        Row(
            trial.number,
            [*(trial.setting.get(axis, "") for axis in sweep.axes), trial.status],
            [_cell(trial, column, best[column.key]) for column in columns],
            sweep.url(trial),
            f"{trial.name} {trial.status}".lower(),
            trial.number in chosen,
        )
        for trial in shown_trials(sweep, answer.recommendation)
    ]
    notes = [note] if (note := thinned_note(sweep)) else []
    if any(cell.excluded for row in rows for cell in row.cells):
        notes.append(
            f"† Timing excluded: other processes used more than {sweep.others_cpu * 100:.3g} % of the cores "
            "(report.others_cpu)."
        )
    return Table(["trial", *sweep.axes, "status", *(c.label for c in columns)], rows, notes)


def _cell(trial: TrialRecord, column: Metric, best: float | None) -> Cell:
    value = trial.figures.get(column.key)
    if value is None:
        return Cell("", "", False, False)
    return Cell(column.text(value), value, value == best, _is_excluded(trial, column))


def _is_excluded(trial: TrialRecord, column: Metric) -> bool:
    return column.is_speed and trial.timing_excluded is not None


def _best(sweep: SweepData, column: Metric) -> float | None:
    trials = [t for t in sweep.trials if t.status is TrialStatus.finished and not _is_excluded(t, column)]
    values = [t.figures.get(column.key, math.nan) for t in trials]
    return column.best_of([value for value in values if math.isfinite(value)])


def shown_trials(sweep: SweepData, recommendation: Recommendation, most: int = MOST) -> list[TrialRecord]:
    """Return all trials of the sweep in order, or if they are more than `MOST` the `most` most important ones.

    Those are the recommended setting's, then the Pareto front's, then the best by each metric of the main picture in
    turn.
    """
    if len(sweep.trials) <= MOST:
        return sweep.trials
    import pandas as pd

    r, settings = recommendation, recommendation.settings.all
    values = {metric: pd.Series([r.value(s, metric) for s in settings]) for metric, _ in r.axes}
    ranks = [values[metric].rank(ascending=better == "min") for metric, better in r.axes]
    rank = pd.concat(ranks, axis=1).min(axis=1).fillna(math.inf)
    places = {s: (s is not r.setting, s not in r.front, rank[place]) for place, s in enumerate(settings)}
    kept = set([number for s in sorted(places, key=places.__getitem__) for number in s.trials][:most])
    return [trial for trial in sweep.trials if trial.number in kept]


def thinned_note(sweep: SweepData, most: int = MOST) -> str:
    """Return a note about the selection of `shown_trials`; "" if all trials are shown."""
    if len(sweep.trials) <= MOST:
        return ""
    return (
        f"{most:,} of {len(sweep.trials):,} trials are shown: the recommended setting's, the Pareto front's, then the "
        "best by each metric. report.csv has all."
    )
