"""A sweep as a table on the terminal, and an epoch as a line."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from rich.text import Text

from fsdp_lab.config.compose import Trial
from fsdp_lab.config.metrics import MEMORY, SPEED, TRAIN_LOSS, VAL_LOSS, Metric, declared, same_loss, table_columns
from fsdp_lab.config.status import TrialStatus
from fsdp_lab.config.wording import count
from fsdp_lab.report.terminal import Column, FittingTable
from fsdp_lab.sweep.names import label, setting_text
from fsdp_lab.sweep.sweep import Sweep
from fsdp_lab.sweep.trial import TrialState

_STYLE = {
    TrialStatus.finished: "green",
    TrialStatus.running: "cyan",
    TrialStatus.waiting: "dim",
    TrialStatus.starting: "dim",
    **dict.fromkeys((TrialStatus.failed, TrialStatus.oom, TrialStatus.diverged), "bold red"),
}
# The figures that decide, and the objectives, stay at any width. Of the others, columns that are not listed here are
# dropped first, then the last listed.
_STAY = (VAL_LOSS, SPEED, MEMORY)
_DROP_LAST = ("val/bits_per_byte", "perf/tokens_per_s", "epoch", "forecast/peak_bytes", "val/accuracy", TRAIN_LOSS)


def trial_table(
    sweep: Sweep, rows: Sequence[tuple[int, TrialState]], chosen: Collection[int] = (), title: str = ""
) -> FittingTable:
    """Return a table with a row for each of the given trials.

    `*` marks the best of a column, `>` the recommended trials. A trial without a status has finished.

    Args:
        chosen: numbers of the recommended trials.
    """
    metrics = _metrics(sweep)
    best, front, digits = _best(sweep, metrics), sweep.front(), len(str(len(sweep.trials) - 1))
    stays = {*_STAY, *(metric for metric, _ in sweep.objectives)}
    columns = [Column("trial", [_trial_cell(n, state, n in chosen, digits) for n, state in rows], justify="left")]
    for key in sweep.swept:
        texts = [setting_text(state.trial, key) for _, state in rows]
        columns.append(Column(key, texts, is_axis=True, justify="left"))
    for metric in metrics:
        cells = [_cell(metric, state, best) for _, state in rows]
        columns.append(Column(metric.label, cells, drop=0 if metric.key in stays else _drop(metric.key)))
    if len(sweep.objectives) > 1:
        columns.append(Column("pareto", ["yes" if n in front else "" for n, _ in rows]))
    return FittingTable(columns, title, elsewhere="results.csv")


def how_far(sweep: Sweep) -> str:
    """Return text such as `3 of 36 trials have a result, 1 failed`."""
    failed = sum(state.status is TrialStatus.failed for state in sweep.trials)
    results = sum(state.status.is_result for state in sweep.trials) - failed
    have = "has" if 1 in (results, len(sweep.trials)) else "have"
    without = f", {failed} failed" if failed else ""
    return f"{results} of {count(len(sweep.trials), 'trial')} {have} a result{without}"


def _drop(key: str) -> int:
    """Return when the column of a metric is dropped: the highest first."""
    return 1 + (_DROP_LAST.index(key) if key in _DROP_LAST else len(_DROP_LAST))


def _metrics(sweep: Sweep) -> list[Metric]:
    known = dict.fromkeys(key for state in sweep.trials for key in state.figures)
    metrics = [metric for metric in table_columns("terminal", known) if metric.key in known]
    of_table = {metric.key for metric in table_columns("terminal")}
    return [*metrics, *(declared(key) for key, _ in sweep.objectives if key not in of_table)]


def _trial_cell(number: int, state: TrialState, is_chosen: bool, digits: int) -> Text:
    style = "bold green" if is_chosen else _STYLE.get(state.status, "yellow")
    status = "" if state.status is TrialStatus.finished else f" {state.status}"
    return Text(f"{'>' if is_chosen else ' '} {number:>{digits}}{status}", style=style)


def _best(sweep: Sweep, columns: Sequence[Metric]) -> dict[str, Mapping[str, float]]:
    """Return for each column the figures of its best finished trial; no column whose trials are equal or unordered."""
    finished = [state.figures for state in sweep.trials if state.status is TrialStatus.finished]
    best: dict[str, Mapping[str, float]] = {}
    for column in columns:
        key = column.key
        having = [figures for figures in finished if key in figures]
        highest = column.best_of([figures[key] for figures in having])
        holder = next((figures for figures in having if figures[key] == highest), None)
        if holder is not None and not all(same_loss(key, figures, holder) for figures in having):
            best[key] = holder
    return best


def _cell(metric: Metric, state: TrialState, best: Mapping[str, Mapping[str, float]]) -> Text:
    text = metric.text(state.figures.get(metric.key))
    if state.status is TrialStatus.finished and metric.key in best and metric.key in state.figures:
        highest = best[metric.key]
        if text == metric.text(highest[metric.key]) or same_loss(metric.key, state.figures, highest):
            return Text(f"*{text}", style="bold green")
    return Text(text)


def epoch_line(trial: Trial, metrics: Mapping[str, float], epochs: int | None) -> str:
    """Return a line about an epoch, for logs; `epochs` is None if `training.max_steps` may end the trial earlier."""
    parts = [
        f"{label(trial)}:",
        f"epoch {metrics['epoch']:.0f}" + (f"/{epochs}" if epochs is not None else ""),
    ]
    parts += [
        f"{column.label} {column.text(metrics[column.key])}"
        for column in table_columns("terminal", metrics)
        if column.key in metrics and column.key != "epoch"
    ]
    return "  ".join(parts)
