"""What a sweep shows: one live table on a terminal, a line an event anywhere else."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from fsdp_lab.engine.files import read_failures
from fsdp_lab.redact import redact
from fsdp_lab.report.answer import Answer, plain_text
from fsdp_lab.status import ExitCode, TrialStatus
from fsdp_lab.sweep.listeners.progress import Doing, Watch, progress_lines
from fsdp_lab.sweep.listeners.table import epoch_line, how_far, shared_note, trial_table
from fsdp_lab.sweep.names import go_on_command, label, relative, resume_command, run_name
from fsdp_lab.sweep.runner import Ending, Listener, SweepRun
from fsdp_lab.sweep.state import SweepState, TrialState
from fsdp_lab.terminal import open_console
from fsdp_lab.wording import duration

_LIVE_ROWS = 20  # a longer table would not fit a screen: the ended ones before are in results.csv
_CAUSED = "direct cause"  # what Python writes between an error and the one that it was raised from
_UPDATE_EVERY_S = 1.0  # of the live table: one of many trials takes its time


class Console(Listener):
    """Prints the sweep's events.

    Args:
        swept: the keys that differ between trials.
        rich: where to print; by default standard output.
        ticks: whether the clock is drawn every second; else a debugger has the terminal for itself between events.
    """

    def __init__(
        self, state: SweepState, swept: Sequence[str], rich: RichConsole | None = None, ticks: bool = True
    ) -> None:
        self._state, self._swept = state, swept
        self.rich = rich or open_console()
        self._begun = time.time()
        self._updated, self._looked, self._stale = 0.0, 0.0, False
        self._watch = Watch()
        # What the thread that draws the clock shows: values that are replaced, never changed.
        self._table: RenderableType = ""
        self._lines: list[str] = []
        self._live: Live | None = None
        if self.rich.is_terminal:
            self._live = Live(
                console=self.rich, get_renderable=self._screen, auto_refresh=ticks, refresh_per_second=1, transient=True
            )

    def __enter__(self) -> Console:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def say(self, text: str) -> None:
        """Print an event on a line of its own, without passwords."""
        text = redact(text)
        if self._live:
            self._live.console.print(text, highlight=False, markup=False)
        else:
            print(f"[{time.time() - self._begun:6.1f} s] {text}", flush=True)

    def update(self) -> None:
        """Show the live table as it is now."""
        self._stale, self._updated = False, time.monotonic()
        if self._live:
            self._table = trial_table(self._state, self._swept, self._in_view())
            self._live.refresh()

    def _screen(self) -> RenderableType:
        clock = how_far(self._state, time.time() - self._begun)
        return Group(self._table, *(Text(line, style="dim") for line in [clock, *self._lines]))

    def final(self, answer: Answer | None = None) -> None:
        """Print the table of all that began, best values marked, and under it what the report recommends."""
        chosen = {trial.number for trial in answer.setting.trials} if answer and answer.setting else set()
        begun = [(i, state) for i, state in enumerate(self._state.trials) if state.status != "waiting"]
        title = how_far(self._state, time.time() - self._begun)
        self.rich.print(trial_table(self._state, self._swept, begun, chosen, title))
        if note := shared_note(self._state):
            self.rich.print(Text(note, style="dim"), soft_wrap=True)
        if answer is not None:
            sentence, *rest = plain_text(answer)
            self.rich.print(Text(answer.head + sentence, style="bold"))
            for line in rest:
                self.rich.print(Text(line), soft_wrap=True)

    def opened(self, sweep: SweepRun) -> None:
        self.update()

    def ready(self, sweep: SweepRun) -> None:
        self.update()

    def began(self, sweep: SweepRun, number: int) -> None:
        state = self._state.trials[number]
        from_epoch = f", from epoch {state.epochs_before}" if state.epochs_before else ""
        self.say(f"{label(number, self._state.trials)} starts{from_epoch}: {run_name(state.trial, self._swept)}")
        self._change()

    def facts(self, sweep: SweepRun, number: int, facts: dict[str, Any]) -> None:
        for note in facts["notes"]:
            sweep.say_once(f"note: {note}")  # each trial's run is tagged with its own

    def epoch(self, sweep: SweepRun, number: int, metrics: dict[str, float]) -> None:
        state = self._state.trials[number]
        if metrics["epoch"] > state.epochs_before:
            shown = None if state.trial.index is None else number
            self.say(epoch_line(shown, metrics, state.trial.config.training.epochs))
        self._change()

    def ended(self, sweep: SweepRun, number: int) -> None:
        state = self._state.trials[number]
        took = f" after {duration(state.seconds)}" if state.seconds is not None else ""
        why = f": {state.error}" if state.error else ""
        if state.status is TrialStatus.failed:
            why += _where_traced(sweep.folder_of(number))
        self.say(f"{label(number, self._state.trials)} {state.status}{took}{why}")
        self._change()

    def tick(self, sweep: SweepRun) -> None:
        if time.monotonic() - self._looked >= _UPDATE_EVERY_S:
            self._looked = time.monotonic()
            self._look(sweep)
        if self._stale:
            self._change()

    def _look(self, sweep: SweepRun) -> None:
        """See what the running trials do, and say once what lasts unusually long."""
        doings: dict[int, Doing] = {}
        for number, state in enumerate(self._state.trials):
            if state.status is not TrialStatus.running:
                continue
            folder, timeout_s = sweep.folder_of(number), state.trial.config.trial_timeout_s
            with suppress(OSError):  # a disk that is away for a moment
                doings[number] = self._watch.look(number, folder)
                if told := self._watch.unusual(number, doings[number], folder, timeout_s):
                    self.say(f"{label(number, self._state.trials)}: {told}")
        to_come = sweep.config.search.num_trials - len(self._state.trials) if sweep.config.search.samples else 0
        repeats = sweep.plan.search is not None and not sweep.config.search.samples  # repeat=auto: more may come
        what = "this round" if repeats else "the sweep"
        self._lines = progress_lines(self._state, doings, max(0, to_come), time.time(), what)

    def closing(self, sweep: SweepRun, ending: Ending) -> None:
        if ending.early and sweep.has_folder:  # at once: a store that hangs may be all that follows
            self.say(f"to resume: {go_on_command(sweep.folder)}")
        self._lines = []  # what runs is ended now
        self.update()

    def closed(self, sweep: SweepRun, ending: Ending) -> None:
        self.update()
        if ending.code is ExitCode.failed and not ending.early:
            theirs = " (after a change of your code also resume_anyway=true)" if sweep.plan.record.user_code else ""
            self.say(f"to try what failed again: {resume_command(sweep.folder)} resume_failed=true{theirs}")

    def _change(self) -> None:
        self._stale = True
        if time.monotonic() - self._updated >= _UPDATE_EVERY_S:
            self.update()

    def _in_view(self) -> list[tuple[int, TrialState]]:
        rows = list(enumerate(self._state.trials))
        first_open = next((i for i, state in rows if not state.ended), len(rows))
        start = max(0, min(first_open - _LIVE_ROWS // 2, len(rows) - _LIVE_ROWS))
        return rows[start : start + _LIVE_ROWS]


def _where_traced(folder: Path) -> str:
    """Say where the traceback of a failed trial is; nothing where there is none, or its message says it all."""
    for failure in read_failures(folder)[:1]:
        if failure["kind"] != "user" or _CAUSED in failure["traceback"]:
            return f" [traceback: {relative(folder / 'failures')}/rank{failure['rank']}.json]"
    return ""
