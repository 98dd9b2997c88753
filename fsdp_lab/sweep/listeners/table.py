"""A sweep as a table on the terminal, and an epoch as a line."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from rich.table import Table
from rich.text import Text

from fsdp_lab.metrics import Metric, table_columns
from fsdp_lab.status import TrialStatus
from fsdp_lab.sweep.names import setting
from fsdp_lab.sweep.state import SweepState, TrialState

_STYLE = {
    TrialStatus.finished: "green",
    TrialStatus.failed: "bold red",
    TrialStatus.interrupted: "yellow",
    TrialStatus.running: "cyan",
    TrialStatus.waiting: "dim",
    TrialStatus.oom: "bold red",
    TrialStatus.diverged: "bold red",
    TrialStatus.stopped: "yellow",
    TrialStatus.skipped: "yellow",
    TrialStatus.starting: "dim",
}


def trial_table(
    sweep: SweepState,
    swept: Sequence[str],
    rows: Sequence[tuple[int, TrialState]],
    seconds: float,
    chosen: Collection[int] = (),
) -> Table:
    """A row for each of the given trials; `*` marks the best of a column, `>` the recommended trials.

    Args:
        swept: the keys that differ between trials.
        seconds: since the sweep began.
    """
    results = sum(state.status.is_result for state in sweep.trials)
    table = Table(title=f"{results} of {len(sweep.trials)} trials have a result, {seconds:.0f} s")
    known = {key for state in sweep.trials for key in state.figures()}
    columns = [c for c in table_columns("terminal") if "epoch" not in known or c.key in known]  # images have no tokens
    several = len(sweep.objectives) > 1
    heads = ("trial", *swept, "status", *(c.label for c in columns), "turnaround s", *(["pareto"] if several else []))
    for name in heads:
        table.add_column(name, justify="left" if name in swept or name == "status" else "right")
    best, front = _best(sweep, columns), sweep.front()
    for number, state in rows:
        figures, best_here = state.figures(), best if state.status is TrialStatus.finished else {}
        table.add_row(
            Text(f"> {number}", style="bold green") if number in chosen else str(number),
            *(str(setting(state.trial, key)) for key in swept),
            Text(state.status, style=_STYLE[state.status]),  # no markup: a line said above the table turns it off
            *(_cell(column, figures.get(column.key), best_here) for column in columns),
            "" if state.turnaround_s is None else f"{state.turnaround_s:.1f}",
            *(["yes" if number in front else ""] if several else []),
        )
    return table


def _best(sweep: SweepState, columns: Sequence[Metric]) -> dict[str, float | None]:
    """For each column the best value of a finished trial; None where all have the same, or none is better."""
    finished = [state.figures() for state in sweep.trials if state.status is TrialStatus.finished]
    return {c.key: c.best_of([figures[c.key] for figures in finished if c.key in figures]) for c in columns}


def _cell(column: Metric, value: float | None, best: Mapping[str, float | None]) -> Text:
    if value is not None and value == best.get(column.key):
        return Text(f"*{column.text(value)}", style="bold green")
    return Text(column.text(value))


def epoch_line(number: int | None, metrics: Mapping[str, float], epochs: int) -> str:
    """One line about an epoch, for logs."""
    parts = [
        f"trial {number}:" if number is not None else "trial:",
        f"epoch {metrics['epoch']:.0f}/{epochs}",
    ]
    parts += [
        f"{column.label} {column.text(metrics[column.key])}"
        for column in table_columns("terminal")
        if column.key in metrics and column.key != "epoch"
    ]
    return "  ".join(parts)
