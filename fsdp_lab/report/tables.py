"""The content of the report's tables, for the page and for Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fsdp_lab.metrics import FORECAST, MEMORY, SPEED, Metric, declared, table_columns
from fsdp_lab.report.answer import Answer
from fsdp_lab.report.data import SweepData, TrialRow
from fsdp_lab.report.effects import effects
from fsdp_lab.report.plots import with_forecast
from fsdp_lab.status import TrialStatus

SHARED_MARK = "†"
TAKE_HOME = "This setting for your own training, in files beside this one"


def columns_of(sweep: SweepData, answer: Answer) -> list[Metric]:
    """Return the metrics that a trial of the sweep has. Those that decided come first: a phone shows only a few."""
    columns = [c for c in table_columns("report") if any(c.key in trial.figures for trial in sweep.trials)]
    decided = [metric for metric, _ in answer.axes]
    return sorted(columns, key=lambda c: c.key not in decided)


def best_of(sweep: SweepData, columns: Sequence[Metric]) -> dict[str, float | None]:
    """Return metric -> the best value of a finished trial; None if no direction is better, or all are equal."""
    best: dict[str, float | None] = {}
    for column in columns:
        trials = [t for t in sweep.trials if t.status is TrialStatus.finished and not is_shared(sweep, t, column)]
        values = [t.figures.get(column.key, math.nan) for t in trials]
        best[column.key] = column.best_of([value for value in values if math.isfinite(value)])
    return best


def is_shared(sweep: SweepData, trial: TrialRow, column: Metric) -> bool:
    """Whether it is a speed that does not count, because others used the cores too."""
    return column.key.startswith("perf/") and bool(column.better) and sweep.shared(trial)


def shared_note(sweep: SweepData, columns: Sequence[Metric]) -> str:
    """Return the meaning of the mark beside a speed; "" if no speed has it."""
    if not any(is_shared(sweep, trial, column) for trial in sweep.trials for column in columns):
        return ""
    return (
        f"{SHARED_MARK} Other processes used more than {sweep.others_cpu * 100:.3g} % of the machine's cores "
        "(report.others_cpu), so the speed does not count."
    )


def about(sweep: SweepData) -> list[tuple[str, str]]:
    """Return the environment of the sweep, as (name, text)."""
    counts = ", ".join(f"{sweep.statuses.count(status)} {status}" for status in dict.fromkeys(sweep.statuses))
    return [("sweep", sweep.name), ("trials", counts), *sweep.about]


def heading(sweep: SweepData, answer: Answer) -> str:
    """Return the study and what it compares."""
    return f"{sweep.study}: {answer.title}" if sweep.study else answer.title


def forecast_sentence(sweep: SweepData) -> str:
    """Return a sentence about the errors of peak forecasts; "" without any."""
    count = len(with_forecast(sweep.trials))
    if not count:
        return ""
    error, number = worst_forecast(sweep)
    if error == 0:
        trials = f"all {count} trials that have both" if count > 1 else "the trial that has both"
        return f"The forecast of the peak equals the measurement, to the byte, in {trials}."
    return f"The forecast of the peak is at most {error * 100:.3g} % off, in trial {number}."


def worst_forecast(sweep: SweepData) -> tuple[float, int]:
    """Return the largest error of a peak forecast, as a ratio, and the trial; zeros without any."""
    errors = [
        (abs(trial.figures[FORECAST] / trial.figures[MEMORY] - 1), trial.number)
        for trial in with_forecast(sweep.trials)
    ]
    return max(errors, key=lambda error: error[0], default=(0.0, 0))


def ended_otherwise(sweep: SweepData) -> list[TrialRow]:
    """Return the trials that ended without finishing, except for those that a scheduler stopped."""
    usual = (TrialStatus.finished, TrialStatus.stopped)
    return [trial for trial in sweep.trials if trial.status.ended and trial.status not in usual]


def stopped_sentence(sweep: SweepData) -> str:
    """Return how many trials a scheduler stopped; "" for none."""
    count = sweep.statuses.count(TrialStatus.stopped)
    return f"The scheduler stopped {count} trial{'s' if count != 1 else ''} early." if count else ""


def not_qualified(answer: Answer) -> list[tuple[str, str]]:
    """Return the settings that do not qualify, with the reason; empty if the lines of the answer name each."""
    return list(answer.why_not.items()) if answer.why_not.keys() - set(answer.described) else []


def effect_rows(sweep: SweepData) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of the effect of each axis alone; no rows for a single axis."""
    metrics = [declared(key) for key in (SPEED, MEMORY, sweep.loss_key)]
    heads = ["axis", "value", "settings", *(metric.label for metric in metrics)]
    rows = []
    for axis in sweep.setting_axes if len(sweep.setting_axes) > 1 else []:
        by_metric = [{effect.value: effect for effect in effects(sweep, axis, metric.key)} for metric in metrics]
        for value in dict.fromkeys(value for of_metric in by_metric for value in of_metric):
            counts = [str(of_metric[value].count) for of_metric in by_metric if value in of_metric]
            row = [axis, value, counts[0]]
            for of_metric, metric in zip(by_metric, metrics, strict=True):
                effect = of_metric.get(value)
                spread = f" ± {metric.text(effect.spread)}" if effect and effect.count > 1 else ""
                row.append(metric.text(effect.mean) + spread if effect else "")
            rows.append(row)
    return heads, rows
