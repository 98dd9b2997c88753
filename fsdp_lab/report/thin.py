"""The trials of a large sweep that the report shows. Pure; the CSV has all."""

from __future__ import annotations

import math
from itertools import chain, zip_longest

from fsdp_lab.report.answer import Answer
from fsdp_lab.report.data import SweepData, TrialRow
from fsdp_lab.status import TrialStatus

MOST = 500  # trials; of more than these a table has so many, a picture so many points
MOST_LINES = 100  # in a picture of lines
MOST_BARS = 60
MOST_ROWS = 100  # of what did not finish or does not qualify


def shown_trials(sweep: SweepData, answer: Answer, most: int = MOST) -> list[TrialRow]:
    """Return all trials of the sweep in order, or if they are more than `MOST` the `most` most important ones.

    Those are the recommended setting's, then the Pareto front's, then the best by each metric of the main picture in
    turn.
    """
    if len(sweep.trials) <= MOST:
        return sweep.trials
    chosen = answer.setting.trials[: most // 2] if answer.setting else []
    front = set(answer.front)
    of_front = [trial for setting in sweep.settings if setting.name in front for trial in setting.trials]
    best = (
        sorted(_finished(sweep, metric), key=lambda t: t.figures[metric], reverse=better == "max")
        for metric, better in answer.axes
    )
    in_turn = (trial for each in zip_longest(*best) for trial in each if trial is not None)
    kept: dict[int, TrialRow] = {}
    for trial in chain(chosen, of_front, in_turn, sweep.trials):
        if len(kept) == most:
            break
        kept.setdefault(trial.number, trial)
    return [kept[number] for number in sorted(kept)]


def _finished(sweep: SweepData, metric: str) -> list[TrialRow]:
    return [
        trial
        for trial in sweep.trials
        if trial.status is TrialStatus.finished
        and math.isfinite(trial.figures.get(metric, math.nan))
        and not sweep.shared(trial)
    ]


def thinned_note(sweep: SweepData, most: int = MOST) -> str:
    """Return a note about the selection of `shown_trials`; "" if all trials are shown."""
    if len(sweep.trials) <= MOST:
        return ""
    return (
        f"{most:,} of {len(sweep.trials):,} trials are shown: the recommended setting's, the Pareto front's, then the "
        "best by each metric. report.csv has all."
    )


def store_note(sweep: SweepData) -> str:
    """Return a note about the runs of a large sweep in MLflow; "" if they have everything."""
    if len(sweep.trials) <= MOST:
        return ""
    return "In MLflow each trial's run has the metrics of the last epoch only; the trial's folder has those of all."


def more_note(count: int, where: str = "; report.csv has all") -> str:
    """Return a note after the first `MOST_ROWS` rows of a table; "" if these are all."""
    return f"and {count - MOST_ROWS:,} more{where}" if count > MOST_ROWS else ""
