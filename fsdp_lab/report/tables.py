"""The table of trials, of a large sweep the most important ones. Pure."""

from __future__ import annotations

import math
from typing import Any

from fsdp_lab.metrics import Metric, table_columns
from fsdp_lab.record.trial import TrialRecord
from fsdp_lab.report.answer import Answer
from fsdp_lab.report.data import SweepData
from fsdp_lab.report.recommend import Recommendation
from fsdp_lab.status import TrialStatus

MOST = 500  # trials in the table and the pictures


def trials_table(sweep: SweepData, answer: Answer) -> dict[str, Any]:
    """Return the heads, the rows and the notes of the table of trials, for the templates.

    The figures that decided come first: a phone shows only a few columns.
    """
    decided = [metric for metric, _ in answer.recommendation.axes]
    columns = [c for c in table_columns("report") if any(c.key in trial.figures for trial in sweep.trials)]
    columns.sort(key=lambda c: c.key not in decided)
    best = {column.key: _best(sweep, column) for column in columns}
    chosen = answer.setting.trials if answer.setting else ()
    rows: list[dict[str, Any]] = [
        {
            "number": trial.number,
            "texts": [*(trial.setting.get(axis, "") for axis in sweep.axes), trial.status],
            "cells": [_cell(trial, column, best[column.key]) for column in columns],
            "url": sweep.url(trial),
            "words": f"{trial.name} {trial.status}".lower(),  # of the filter
            "chosen": trial.number in chosen,
        }
        for trial in shown_trials(sweep, answer.recommendation)
    ]
    notes = [note] if (note := thinned_note(sweep)) else []
    if any(cell["excluded"] for row in rows for cell in row["cells"]):
        notes.append(
            f"† Timing excluded: other processes used more than {sweep.others_cpu * 100:.3g} % of the cores "
            "(report.others_cpu)."
        )
    return {"heads": ["trial", *sweep.axes, "status", *(c.label for c in columns)], "rows": rows, "notes": notes}


def _cell(trial: TrialRecord, column: Metric, best: float | None) -> dict[str, Any]:
    value = trial.figures.get(column.key)
    if value is None:
        return {"text": "", "value": "", "best": False, "excluded": False}
    is_excluded = _is_excluded(trial, column)
    return {"text": column.text(value), "value": value, "best": value == best, "excluded": is_excluded}


def _is_excluded(trial: TrialRecord, column: Metric) -> bool:
    return column.is_speed and trial.timing_excluded is not None


def _best(sweep: SweepData, column: Metric) -> float | None:
    trials = [t for t in sweep.trials if t.status is TrialStatus.finished and not _is_excluded(t, column)]
    values = [t.figures.get(column.key, math.nan) for t in trials]
    return column.best_of([value for value in values if math.isfinite(value)])


def shown_trials(sweep: SweepData, recommendation: Recommendation) -> list[TrialRecord]:
    """Return up to `MOST` trials, in order: the recommended setting's, the Pareto front's, then the first others."""
    chosen = recommendation.setting.trials if recommendation.setting else ()
    front = {number for setting in recommendation.front for number in setting.trials}
    ranked = sorted(sweep.trials, key=lambda trial: (trial.number not in chosen, trial.number not in front))
    return sorted(ranked[:MOST], key=lambda trial: trial.number)


def thinned_note(sweep: SweepData) -> str:
    """Return a note about the selection of `shown_trials`; "" if all trials are shown."""
    if len(sweep.trials) <= MOST:
        return ""
    return (
        f"{MOST:,} of {len(sweep.trials):,} trials are shown: the recommended setting's, the Pareto front's, then the "
        "first others. report.csv has all."
    )
