"""What a sweep shows: one live table on a terminal, a line an event anywhere else."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType

from rich.console import Console as RichConsole
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fsdp_lab.metrics import Metric, table_columns
from fsdp_lab.report.answer import Answer
from fsdp_lab.sweep.results import TrialState, setting

_STYLE = {
    "finished": "green",
    "failed": "bold red",
    "interrupted": "yellow",
    "running": "cyan",
    "waiting": "dim",
    "oom": "bold red",
    "diverged": "bold red",
    "stopped": "yellow",
    "skipped": "yellow",
    "starting": "dim",
}
_FILE_WIDTH = 160  # of a table that goes to a file or a pipe, which says no width
_LIVE_ROWS = 20  # a longer table would not fit a screen: the ended ones before are in results.csv


class Console:
    """Use as a context; `say` a line, `update` after a change of states."""

    def __init__(self, states: Sequence[TrialState], swept: Sequence[str]) -> None:
        self.states, self.swept = states, swept
        self.rich = RichConsole()
        if not self.rich.is_terminal:
            self.rich = RichConsole(width=_FILE_WIDTH)
        self.live = Live(console=self.rich, auto_refresh=False, transient=True) if self.rich.is_terminal else None
        self.begun = time.time()
        self.front: Callable[[], Collection[int]] | None = None  # of several objectives

    def __enter__(self) -> Console:
        if self.live:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live:
            self.live.stop()

    def say(self, text: str) -> None:
        """An event, on a line of its own."""
        if self.live:
            self.live.console.print(text, highlight=False, markup=False)
        else:
            print(f"[{time.time() - self.begun:6.1f} s] {text}", flush=True)

    def update(self) -> None:
        if self.live:
            self.live.update(self._table(self._in_view()), refresh=True)

    def final(self, answer: Answer | None = None) -> None:
        """The table of all that began, best values marked, and under it what the report recommends."""
        chosen = {trial.number for trial in answer.setting.trials} if answer and answer.setting else set()
        begun = [(i, state) for i, state in enumerate(self.states) if state.status != "waiting"]
        self.rich.print(self._table(begun, chosen))
        if answer is not None:
            head = "recommended: " if answer.setting else ""
            self.rich.print(Text(head + answer.sentence.replace("`", ""), style="bold"))
            if answer.command:
                self.rich.print(Text(f"  {answer.command}"), soft_wrap=True)

    def _in_view(self) -> list[tuple[int, TrialState]]:
        rows = list(enumerate(self.states))
        first_open = next((i for i, state in rows if not state.ended), len(rows))
        start = max(0, min(first_open - _LIVE_ROWS // 2, len(rows) - _LIVE_ROWS))
        return rows[start : start + _LIVE_ROWS]

    def _table(self, rows: list[tuple[int, TrialState]], chosen: Collection[int] = ()) -> Table:
        """A row a trial; `*` marks the best of a column, `>` the recommended trials."""
        ended = sum(state.ended and state.status != "interrupted" for state in self.states)
        table = Table(title=f"{ended} of {len(self.states)} trials have a result, {time.time() - self.begun:.0f} s")
        columns = table_columns("terminal")
        pareto = ["pareto"] if self.front else []
        heads = ("trial", *self.swept, "status", *(column.label for column in columns), "turnaround s", *pareto)
        for name in heads:
            table.add_column(name, justify="left" if name in self.swept or name == "status" else "right")
        best = self._best(columns)
        front = self.front() if self.front else ()
        for number, state in rows:
            figures, best_here = state.figures(), best if state.status == "finished" else {}
            table.add_row(
                Text(f"> {number}", style="bold green") if number in chosen else str(number),
                *(str(setting(state.trial, key)) for key in self.swept),
                Text(state.status, style=_STYLE[state.status]),  # no markup: a line said above the table turns it off
                *(_cell(column, figures.get(column.key), best_here) for column in columns),
                "" if state.turnaround_s is None else f"{state.turnaround_s:.1f}",
                *(["yes" if number in front else ""] if self.front else []),
            )
        return table

    def _best(self, columns: Sequence[Metric]) -> dict[str, float | None]:
        """For each column the best value of a finished trial; None where all have the same, or none is better."""
        finished = [state.figures() for state in self.states if state.status == "finished"]
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
