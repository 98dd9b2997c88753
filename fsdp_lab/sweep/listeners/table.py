"""A sweep as a table on the terminal, and an epoch as a line."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rich.text import Text

from fsdp_lab.metrics import MEMORY, OTHERS_CPU, SPEED, TRAIN_LOSS, VAL_LOSS, Metric, declared, table_columns
from fsdp_lab.status import TrialStatus
from fsdp_lab.sweep.names import setting
from fsdp_lab.sweep.state import SweepState, TrialState
from fsdp_lab.terminal import Column, FittingTable
from fsdp_lab.wording import count, duration

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
# What a sweep is decided by stays at any width, with the objectives. Of the others the last leaves first, and before it
# what is not listed.
_STAY = (VAL_LOSS, SPEED, MEMORY)
_DROP_LAST = ("val/bits_per_byte", "perf/tokens_per_s", "epoch", "forecast/peak_bytes", "val/accuracy", TRAIN_LOSS)


def trial_table(
    sweep: SweepState,
    swept: Sequence[str],
    rows: Sequence[tuple[int, TrialState]],
    chosen: Collection[int] = (),
    title: str = "",
) -> FittingTable:
    """Returns a table with a row for each of the given trials.

    `*` marks the best of a column, `>` the recommended trials, `†` a speed that does not count because others used the
    cores. A trial without another word has finished.

    Args:
        swept: the keys that differ between trials.
    """
    metrics = _metrics(sweep)
    best, front = _best(sweep, metrics), sweep.front()
    stays = {*_STAY, *(metric for metric, _ in sweep.objectives)}
    columns = [
        Column(
            "trial",
            [_trial_cell(n, state, n in chosen, len(str(len(sweep.trials) - 1))) for n, state in rows],
            justify="left",
        ),
        *(
            Column(key, [_value(setting(state.trial, key)) for _, state in rows], breaks=True, justify="left")
            for key in swept
        ),
        *(
            Column(
                metric.label,
                [_cell(metric, state, best) for _, state in rows],
                drop=0 if metric.key in stays else _drop(metric.key),
            )
            for metric in metrics
        ),
    ]
    if len(sweep.objectives) > 1:
        columns.append(Column("pareto", ["yes" if n in front else "" for n, _ in rows]))
    return FittingTable(columns, title, elsewhere="results.csv")


def shared_note(sweep: SweepState) -> str | None:
    """Returns what `†` means, where a trial has one."""
    marked = [state for state in sweep.trials if state.figures().get(OTHERS_CPU, 0.0) > _limit(state)]
    if not marked:
        return None
    return f"† Others used more than {_limit(marked[0]) * 100:.3g} % of the cores meanwhile: this speed does not count."


def _value(value: Any) -> str:
    """A setting's value; of what a search has drawn six significant digits, `results.csv` has all."""
    return f"{value:.6g}" if isinstance(value, float) and abs(value) < 1e6 else str(value)


def how_far(sweep: SweepState, seconds: float) -> str:
    """Returns `3 of 36 trials have a result, 1 failed, after 2 min 5 s`."""
    failed = sum(state.status is TrialStatus.failed for state in sweep.trials)
    results = sum(state.status.is_result for state in sweep.trials) - failed
    have = "have" if len(sweep.trials) > 1 else "has"
    without = f", {failed} failed" if failed else ""
    return f"{results} of {count(len(sweep.trials), 'trial')} {have} a result{without}, after {duration(seconds)}"


def _drop(key: str) -> int:
    """Returns when the column of a metric leaves: the highest first."""
    return 1 + (_DROP_LAST.index(key) if key in _DROP_LAST else len(_DROP_LAST))


def _metrics(sweep: SweepState) -> list[Metric]:
    """What the trials have reported, and the objectives; before the first epoch what every trial will report."""
    known = {key for state in sweep.trials for key in state.figures()}
    shown = known if "epoch" in known else {*known, *_STAY, "epoch"}
    metrics = [metric for metric in table_columns("terminal") if metric.key in shown]
    of_table = {metric.key for metric in table_columns("terminal")}
    return [*metrics, *(declared(key) for key, _ in sweep.objectives if key not in of_table)]


def _trial_cell(number: int, state: TrialState, is_chosen: bool, digits: int) -> Text:
    style = "bold green" if is_chosen else _STYLE[state.status]
    status = "" if state.status is TrialStatus.finished else f" {state.status}"
    return Text(f"{'>' if is_chosen else ' '} {number:>{digits}}{status}", style=style)


def _best(sweep: SweepState, columns: Sequence[Metric]) -> dict[str, float | None]:
    """For each column the best value of a finished trial; None where all have the same, or none is better."""
    finished = [state for state in sweep.trials if state.status is TrialStatus.finished]
    return {
        c.key: c.best_of([s.figures()[c.key] for s in finished if c.key in s.figures() and _counts(c, s)])
        for c in columns
    }


def _counts(metric: Metric, state: TrialState) -> bool:
    """Whether a figure is one of speed that says nothing, because others used the cores of the trial."""
    return not metric.is_speed or state.figures().get(OTHERS_CPU, 0.0) <= _limit(state)


def _limit(state: TrialState) -> float:
    return state.trial.config.report.others_cpu


def _cell(metric: Metric, state: TrialState, best: Mapping[str, float | None]) -> Text:
    value, highest = state.figures().get(metric.key), best.get(metric.key)
    if value is None:
        return Text(metric.text(value))
    if not _counts(metric, state):
        return Text(f"{metric.text(value)}†")
    if state.status is TrialStatus.finished and highest is not None and metric.text(value) == metric.text(highest):
        return Text(f"*{metric.text(value)}", style="bold green")
    return Text(metric.text(value))


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
