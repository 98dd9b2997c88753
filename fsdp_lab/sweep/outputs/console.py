"""The output of a sweep: a line for each event, on a terminal with a progress bar below, and the last table."""

from __future__ import annotations

import time

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from fsdp_lab.config.status import ExitCode, TrialStatus
from fsdp_lab.config.sweep import Engine
from fsdp_lab.config.wording import duration
from fsdp_lab.report.answer import Answer, plain_text
from fsdp_lab.report.render import reason_text
from fsdp_lab.report.terminal import open_console
from fsdp_lab.sweep.names import label, relative, resume_command, resume_lines, run_name
from fsdp_lab.sweep.outputs.table import epoch_line, how_far, trial_table
from fsdp_lab.sweep.sweep import Sweep

MOST_ROWS = 500  # of the last table; of more trials it has a few
_FEW_ROWS = 50


class Console:
    """Prints the sweep's events.

    Args:
        rich: where to print; None: standard output.

    Attributes:
        bar: the progress over trials and epochs. With `engine=inline` it is drawn only at events, so that a debugger
            can use the terminal between them.
    """

    def __init__(self, sweep: Sweep, rich: RichConsole | None = None) -> None:
        self._sweep = sweep
        self.rich = rich or open_console()
        self._begun = time.time()
        self.bar = Progress(
            TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=self.rich,
            auto_refresh=sweep.config.engine is not Engine.inline, refresh_per_second=1, transient=True,
            disable=not self.rich.is_terminal,
        )  # fmt: skip
        self._task = self.bar.add_task(how_far(sweep))

    def log(self, text: str) -> None:
        """Print an event on a line of its own."""
        if self.rich.is_terminal:
            self.rich.print(text, highlight=False, markup=False)
        else:
            print(f"[{time.time() - self._begun:6.1f} s] {text}")

    def draw(self) -> None:
        """Draw the bar."""
        sweep, search = self._sweep, self._sweep.config.search
        total = max(len(sweep.trials), search.num_trials if search.samples else 0)
        done = sum(state.share_done for state in sweep.trials)
        self.bar.update(self._task, description=how_far(sweep), completed=done, total=total, refresh=True)

    def final(self, answer: Answer | None = None) -> None:
        """Print the table of all trials that began, best values marked, and below it the report's recommendation."""
        chosen = set(answer.setting.trials) if answer and answer.setting else set()
        begun = [(i, state) for i, state in enumerate(self._sweep.trials) if state.status is not TrialStatus.waiting]
        title = f"{how_far(self._sweep)}, after {duration(time.time() - self._begun)}"
        if len(begun) > MOST_ROWS:
            begun = sorted(begun, key=lambda row: row[0] not in chosen)[:_FEW_ROWS]
            title += f"; {_FEW_ROWS} are below, the recommended ones first; all are in results.csv"
        self.rich.print(trial_table(self._sweep, begun, chosen, title))
        if answer is not None:
            sentence, *rest = plain_text(answer)
            self.rich.print(Text(sentence, style="bold"))
            for line in rest:
                self.rich.print(Text(line), soft_wrap=True)

    def began(self, number: int) -> None:
        state = self._sweep.trials[number]
        from_epoch = f", from epoch {state.epochs_before} (finished)" if state.epochs_before else ""
        self.log(f"{label(state.trial)} starts{from_epoch}: {run_name(state.trial, self._sweep.swept)}")

    def facts(self, number: int) -> None:
        """Log the notes of a trial, each once."""
        for note in self._sweep.trials[number].facts["notes"]:
            self._sweep.log_once(f"note: {note}")  # each trial's run is tagged with its own

    def epoch(self, number: int, metrics: dict[str, float]) -> None:
        state = self._sweep.trials[number]
        if metrics["epoch"] > state.epochs_before:
            training = state.trial.config.training
            self.log(epoch_line(state.trial, metrics, training.epochs if training.max_steps is None else None))

    def ended(self, number: int) -> None:
        state = self._sweep.trials[number]
        took = f" after {duration(state.seconds)}" if state.seconds is not None else ""
        why = f": {reason_text(state.reason)}" if state.reason else ""
        path = self._sweep.folder_of(number) / "error.txt"  # not there if the message is enough
        if state.status is TrialStatus.failed and path.exists():
            why += f" [traceback: {relative(path)}]"
        self.log(f"{label(state.trial)} {state.status}{took}{why}")

    def closing(self) -> None:
        """Log how to resume an interrupted sweep, before anything that may hang."""
        if self._sweep.ends_early:
            for line in resume_lines(self._sweep.folder):
                self.log(line)

    def closed(self) -> None:
        """Log how to repeat failed trials."""
        sweep = self._sweep
        failed = any(state.status is TrialStatus.failed for state in sweep.trials)
        if failed and sweep.ending is ExitCode.failed and not sweep.ends_early:
            theirs = " (if your code changed, also resume_anyway=true)" if sweep.started.user_packages else ""
            again = resume_command(sweep.folder)
            self.log(f"to retry failed trials: {again} resume_failed=true{theirs}")
