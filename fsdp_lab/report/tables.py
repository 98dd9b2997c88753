"""The table of trials, of a large sweep the most important ones. Pure."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from fsdp_lab.config.metrics import table_columns
from fsdp_lab.config.status import TrialStatus
from fsdp_lab.record.sweep import SweepRecord
from fsdp_lab.record.trial import TrialRecord
from fsdp_lab.report.recommend import Recommendation

MOST = 500  # trials in the table and the pictures


def trials_table(sweep: SweepRecord, r: Recommendation) -> dict[str, Any]:
    """Return the columns of the table of trials with the best value of each, and its trials, for the templates.

    The figures that decided come first: a phone shows only a few columns.
    """
    frame = sweep.frame()
    decided = [metric for metric, _ in r.axes]
    columns = sorted((c for c in table_columns("report", frame) if c.key in frame), key=lambda c: c.key not in decided)
    finished = frame[frame["status"] == TrialStatus.finished]
    known = {c.key: finished[c.key].replace(math.inf, math.nan).dropna() for c in columns}
    best = {column.key: column.best_of(list(known[column.key])) for column in columns}
    return {
        "heads": ["trial", *sweep.axes, "status", *(column.label for column in columns)],
        "columns": columns,
        "best": best,
        "url": partial(url_of, sweep),
        "trials": shown_trials(sweep, r),
    }


def shown_trials(sweep: SweepRecord, r: Recommendation) -> list[TrialRecord]:
    """Return up to `MOST` trials, in order: the recommended setting's, the Pareto front's, then the first others."""
    chosen = r.setting.trials if r.setting else ()
    front = {number for setting in r.front for number in setting.trials}
    ranked = sorted(sweep.trials, key=lambda trial: (trial.number not in chosen, trial.number not in front))
    return sorted(ranked[:MOST], key=lambda trial: trial.number)


def url_of(sweep: SweepRecord, trial: TrialRecord) -> str:
    """Return the address of a trial's run; "" if not known."""
    return f"{sweep.runs_url}/{trial.run_id}" if sweep.runs_url and trial.run_id else ""
