"""The output of a sweep: a line for each event, on a terminal with a progress bar below, and the last table."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from fsdp_lab.config.status import ExitCode, TrialStatus
from fsdp_lab.config.wording import duration
from fsdp_lab.report.answer import Answer, plain_text
from fsdp_lab.report.reason_texts import reason_text
from fsdp_lab.report.terminal import open_console
from fsdp_lab.sweep.listeners.pace import Pace
from fsdp_lab.sweep.listeners.progress import share_done
from fsdp_lab.sweep.listeners.table import epoch_line, how_far, trial_table
from fsdp_lab.sweep.names import label, relative, resume_command, resume_lines, run_name
from fsdp_lab.sweep.runner import Ending, Listener, SweepRun
from fsdp_lab.sweep.state import SweepState

MOST_ROWS = 500  # of the last table; of more trials it has a few
_FEW_ROWS = 50


class Console(Listener):
    """Prints the sweep's events.

    Args:
        swept: the keys that differ between trials.
        rich: where to print; None: standard output.
        ticks: whether the bar is drawn every second; otherwise a debugger has the terminal for itself between events.
    """

    def __init__(
        self, state: SweepState, swept: Sequence[str], rich: RichConsole | None = None, ticks: bool = True
    ) -> None:
        self._state, self._swept = state, swept
        self.rich = rich or open_console()
        self._begun = time.time()
        self._draws, self._looks = Pace(), Pace()
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=self.rich,
            auto_refresh=ticks, refresh_per_second=1, transient=True, disable=not self.rich.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task(how_far(state))

    def __enter__(self) -> Console:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def log(self, text: str) -> None:
        """Print an event on a line of its own."""
        if self.rich.is_terminal:
            self.rich.print(text, highlight=False, markup=False)
        else:
            print(f"[{time.time() - self._begun:6.1f} s] {text}")

    def update(self, sweep: SweepRun) -> None:
        """Draw the bar, over the trials and their epochs."""
        search = sweep.config.search
        total = max(len(self._state.trials), search.num_trials if search.samples else 0)
        done = sum(map(share_done, self._state.trials))
        self._bar.update(self._task, description=how_far(self._state), completed=done, total=total, refresh=True)

    def final(self, answer: Answer | None = None) -> None:
        """Print the table of all trials that began, best values marked, and below it the report's recommendation."""
        chosen = set(answer.setting.trials) if answer and answer.setting else set()
        begun = [(i, state) for i, state in enumerate(self._state.trials) if state.status != "waiting"]
        title = f"{how_far(self._state)}, after {duration(time.time() - self._begun)}"
        if len(begun) > MOST_ROWS:
            begun = sorted(begun, key=lambda row: row[0] not in chosen)[:_FEW_ROWS]
            title += f"; {_FEW_ROWS} are below, the recommended ones first; all are in results.csv"
        self.rich.print(trial_table(self._state, self._swept, begun, chosen, title))
        if answer is not None:
            sentence, *rest = plain_text(answer)
            self.rich.print(Text(sentence, style="bold"))
            for line in rest:
                self.rich.print(Text(line), soft_wrap=True)

    def changed(self, sweep: SweepRun, number: int) -> None:
        if self._draws.is_due:
            with self._draws.kept():
                self.update(sweep)

    def began(self, sweep: SweepRun, number: int) -> None:
        state = self._state.trials[number]
        from_epoch = f", from epoch {state.epochs_before}" if state.epochs_before else ""
        self.log(f"{label(number, self._state.trials)} starts{from_epoch}: {run_name(state.trial, self._swept)}")

    def facts(self, sweep: SweepRun, number: int, facts: dict[str, Any]) -> None:
        """Log the notes of a trial, each once."""
        for note in facts["notes"]:
            sweep.log_once(f"note: {note}")  # each trial's run is tagged with its own

    def epoch(self, sweep: SweepRun, number: int, metrics: dict[str, float]) -> None:
        state = self._state.trials[number]
        if metrics["epoch"] > state.epochs_before:
            shown = None if state.trial.index is None else number
            training = state.trial.config.training
            self.log(epoch_line(shown, metrics, training.epochs if training.max_steps is None else None))

    def ended(self, sweep: SweepRun, number: int) -> None:
        state = self._state.trials[number]
        took = f" after {duration(state.seconds)}" if state.seconds is not None else ""
        why = f": {reason_text(state.reason)}" if state.reason else ""
        if state.status is TrialStatus.failed:
            why += _where_traced(sweep.folder_of(number))
        self.log(f"{label(number, self._state.trials)} {state.status}{took}{why}")

    def tick(self, sweep: SweepRun) -> None:
        """Draw the bar."""
        if self._looks.is_due:
            with self._looks.kept():
                self.update(sweep)

    def closing(self, sweep: SweepRun, ending: Ending) -> None:
        """Log how to resume an interrupted sweep, before anything that may hang."""
        if ending.early:  # at once: a store that hangs may be all that follows
            for line in resume_lines(sweep.folder):
                self.log(line)
        self.update(sweep)

    def closed(self, sweep: SweepRun, ending: Ending) -> None:
        """Log how to repeat failed trials."""
        if ending.code is ExitCode.failed and not ending.early:
            theirs = " (if your code changed, also resume_anyway=true)" if sweep.plan.started.user_packages else ""
            again = resume_command(sweep.folder)
            self.log(f"to retry failed trials: {again} resume_failed=true{theirs}")


def _where_traced(folder: Path) -> str:
    """Return where the traceback of a failed trial is; "" without one, or if its message is enough."""
    path = folder / "error.txt"
    return f" [traceback: {relative(path)}]" if path.exists() else ""
