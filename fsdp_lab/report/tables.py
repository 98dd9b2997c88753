"""What the report's tables hold, for the page and for Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fsdp_lab.metrics import MEMORY, SPEED, Metric, declared, table_columns
from fsdp_lab.report.answer import Answer
from fsdp_lab.report.data import Sweep, Trial
from fsdp_lab.report.effects import effects
from fsdp_lab.report.plots import FORECAST, with_forecast
from fsdp_lab.status import TrialStatus

SHARED_MARK = "†"
TAKE_HOME = "This setting for your own training, in files beside this one"


def columns_of(sweep: Sweep, found: Answer) -> list[Metric]:
    """The metrics that a trial of the sweep has; those that decided come first, for a phone shows only a few."""
    columns = [c for c in table_columns("report") if any(c.key in trial.figures for trial in sweep.trials)]
    decided = [metric for metric, _ in found.axes]
    return sorted(columns, key=lambda c: c.key not in decided)


def best_of(sweep: Sweep, columns: Sequence[Metric]) -> dict[str, float | None]:
    """Metric -> the best value of a finished trial; None where none is better, or all are the same."""
    found: dict[str, float | None] = {}
    for column in columns:
        trials = [t for t in sweep.trials if t.status is TrialStatus.finished and not is_shared(sweep, t, column)]
        values = [t.figures.get(column.key, math.nan) for t in trials]
        found[column.key] = column.best_of([value for value in values if math.isfinite(value)])
    return found


def is_shared(sweep: Sweep, trial: Trial, column: Metric) -> bool:
    """Whether it is a speed that does not count, because others used the cores too."""
    return column.key.startswith("perf/") and bool(column.better) and sweep.shared(trial)


def shared_note(sweep: Sweep, columns: Sequence[Metric]) -> str:
    """What the mark beside a speed means; "" where none has it."""
    if not any(is_shared(sweep, trial, column) for trial in sweep.trials for column in columns):
        return ""
    return (
        f"{SHARED_MARK} Others used more than {sweep.others_cpu * 100:.3g} % of the machine's cores meanwhile "
        "(report.others_cpu), so the speed does not count."
    )


def about(sweep: Sweep) -> list[tuple[str, str]]:
    """Where it ran and with what, as (name, text)."""
    counts = ", ".join(f"{sweep.statuses.count(status)} {status}" for status in dict.fromkeys(sweep.statuses))
    return [("sweep", sweep.name), ("trials", counts), *sweep.about]


def heading(sweep: Sweep, found: Answer) -> str:
    """The study and what it compares."""
    return f"{sweep.study}: {found.title}" if sweep.study else found.title


def forecast_sentence(sweep: Sweep) -> str:
    """How good the forecasts of the peak were; "" without any."""
    count = len(with_forecast(sweep))
    if not count:
        return ""
    error, number = worst_forecast(sweep)
    if error == 0:
        trials = f"all {count} trials that have both" if count > 1 else "the trial that has both"
        return f"The forecast of the peak equals the measurement, to the byte, in {trials}."
    return f"The forecast of the peak is at most {error * 100:.3g} % off, in trial {number}."


def worst_forecast(sweep: Sweep) -> tuple[float, int]:
    """The largest error of a forecast of the peak, as a ratio, and the trial; zeros without any."""
    errors = [
        (abs(trial.figures[FORECAST] / trial.figures[MEMORY] - 1), trial.number) for trial in with_forecast(sweep)
    ]
    return max(errors, key=lambda error: error[0], default=(0.0, 0))


def ended_otherwise(sweep: Sweep) -> list[Trial]:
    """The trials that ended without finishing, but for those that a scheduler stopped."""
    usual = (TrialStatus.finished, TrialStatus.stopped)
    return [trial for trial in sweep.trials if trial.status.ended and trial.status not in usual]


def stopped_sentence(sweep: Sweep) -> str:
    """How many trials a scheduler stopped; "" for none."""
    count = sweep.statuses.count(TrialStatus.stopped)
    return f"The scheduler stopped {count} trial{'s' if count != 1 else ''} early." if count else ""


def not_told(sweep: Sweep, found: Answer) -> list[tuple[str, str]]:
    """The settings that do not qualify and of which no line says so, with the reason."""
    return [(name, reason) for name, reason in found.why_not.items() if name not in found.told]


def effect_rows(sweep: Sweep) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of what each axis does alone; no rows for a single axis."""
    metrics = [declared(key) for key in (SPEED, MEMORY, sweep.loss_key)]
    heads = ["axis", "value", "settings", *(metric.label for metric in metrics)]
    rows = []
    for axis in sweep.setting_axes if len(sweep.setting_axes) > 1 else []:
        by_metric = [{effect.value: effect for effect in effects(sweep, axis, metric.key)} for metric in metrics]
        for value in dict.fromkeys(value for found in by_metric for value in found):
            counts = [str(found[value].count) for found in by_metric if value in found]
            row = [axis, value, counts[0]]
            for found, metric in zip(by_metric, metrics, strict=True):
                effect = found.get(value)
                spread = f" ± {metric.text(effect.spread)}" if effect and effect.count > 1 else ""
                row.append(metric.text(effect.mean) + spread if effect else "")
            rows.append(row)
    return heads, rows
