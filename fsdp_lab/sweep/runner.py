"""A sweep from its first trial to its last: an executor runs the trials, listeners publish what becomes of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from fsdp_lab.compose import Trial
from fsdp_lab.config import SweepConfig, UserError
from fsdp_lab.engine.files import (
    Outcome,
    clear_attempt,
    clear_left_over,
    exported,
    read_facts,
    read_metrics,
    read_outcome,
    read_progress,
    write_outcome,
)
from fsdp_lab.files import sync, write_json
from fsdp_lab.forecast.fits import Forecast
from fsdp_lab.status import ExitCode, TrialStatus
from fsdp_lab.sweep.search import Search
from fsdp_lab.sweep.shutdown import interruptible
from fsdp_lab.sweep.state import SweepState, TrialState
from fsdp_lab.sweep.store.paths import make_storage, storage, trial_address
from fsdp_lab.sweep.store.record import Record, add_trial, restore_hydra_folder, write_hydra_folder


@dataclass(frozen=True)
class SweepPlan:
    """What a sweep is to do.

    Attributes:
        state: the trials that are known at first; a search adds its own.
        config: of any trial, for the keys that all share.
        swept: the keys that differ between trials.
        resumed: whether an earlier start has left something of them in the folder.
    """

    state: SweepState
    config: SweepConfig
    folder: Path
    swept: Sequence[str]
    record: Record
    search: Search | None = None
    resumed: bool = False


class FolderGone(UserError):
    """The sweep's folder was removed or moved while it ran."""


class Listener:
    """Is called with what happens in a sweep, each time after the sweep's own state and files have it.

    Entered before anything starts, left after everything has ended. Only `opened` may raise.
    """

    def __enter__(self) -> Listener:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def opened(self, sweep: SweepRun) -> None:
        """Nothing has started yet. A `UserError` from here ends the sweep."""

    def ready(self, sweep: SweepRun) -> None:
        """The executor can run trials, and has begun none."""

    def added(self, sweep: SweepRun, number: int) -> None:
        """A search has suggested one more trial."""

    def began(self, sweep: SweepRun, number: int) -> None:
        """A trial runs; a second time where its process was killed and it is tried again."""

    def facts(self, sweep: SweepRun, number: int, facts: dict[str, Any]) -> None:
        """A trial is about to take its first step, on this device and these data."""

    def forecast(self, sweep: SweepRun, number: int) -> None:
        """The forecast of a trial is known."""

    def epoch(self, sweep: SweepRun, number: int, metrics: dict[str, float]) -> None:
        """A trial has finished an epoch."""

    def ended(self, sweep: SweepRun, number: int) -> None:
        """A trial has its result; or, interrupted, none yet."""

    def tick(self, sweep: SweepRun) -> None:
        """Called several times a second while trials run."""

    def closing(self, sweep: SweepRun, ending: Ending) -> None:
        """The sweep ends; trials that still run are ended after this."""

    def closed(self, sweep: SweepRun, ending: Ending) -> None:
        """Every trial that ran has ended."""

    def finish(self, sweep: SweepRun, ending: Ending) -> None:
        """All listeners have closed: time for what needs their files."""

    def say(self, text: str) -> None:
        """A message for the user."""


@dataclass(frozen=True)
class Ending:
    """How a sweep ends. `error`: what ended it before its time, other than an interrupt."""

    code: ExitCode
    error: BaseException | None = None

    @property
    def early(self) -> bool:
        return self.code is ExitCode.interrupted or self.error is not None


class Executor(Protocol):
    """Runs the trials that `SweepRun.next` gives."""

    @property
    def interrupted_by(self) -> str | None:
        """What of its own ended by itself, where that interrupted the sweep."""

    def start(self, sweep: SweepRun) -> None:
        """Get what trials need. Raises UserError where it cannot be had."""

    def run(self, sweep: SweepRun) -> None:
        """Run trials until there are no more."""

    def stop(self) -> None:
        """End what `start` started."""


def run_sweep(plan: SweepPlan, executor: Executor, listeners: Sequence[Listener]) -> ExitCode:
    """Run the trials of a plan, as many side by side as the executor holds. The folder is locked by the caller.

    Raises:
        UserError: MLflow or Ray cannot be reached, or a trial needs more than the cluster has.
    """
    sweep = SweepRun(plan, listeners)
    with ExitStack() as stack:
        stack.enter_context(interruptible(sweep))
        for listener in listeners:
            stack.enter_context(listener)
        error: BaseException | None = None
        interrupted = False
        try:
            sweep.open()
            if sweep.has_more():
                executor.start(sweep)
                sweep.publish("ready")
                if sweep.has_more():
                    executor.run(sweep)
                    sweep.check_folder()
            else:
                what = "the trial has" if len(sweep.states) == 1 else f"all {len(sweep.states)} trials have"
                sweep.say(f"nothing is left to do: {what} a result")
        except KeyboardInterrupt:
            interrupted = True
            lost = executor.interrupted_by
            sweep.say(f"{lost} has ended: it was killed" if lost else "interrupted")
        except FolderGone as gone:
            error = gone
            sweep.say(str(gone))
        except BaseException as caught:
            error = caught
            raise
        finally:
            # before the executor stops: that takes seconds, and people press Ctrl-C twice
            code = sweep.close(interrupted, error)
            executor.stop()
    return code


class SweepRun:
    """A sweep while it runs: keeps its state and its folder, and publishes each change to the listeners."""

    def __init__(self, plan: SweepPlan, listeners: Sequence[Listener]) -> None:
        self.plan, self.config, self.folder = plan, plan.config, plan.folder
        self.state = plan.state
        self.closed = False
        # What is there as long as the folder is; processes of a trial may make a folder of its name again.
        self._mark = [path for path in (self.folder / "sweep.json",) if path.exists()]
        self._listeners = listeners
        self._opened = False
        self._said: set[str] = set()
        self._facts_read = {number for number, state in enumerate(plan.state.trials) if state.ended}
        self._places_free_since: list[float] = []

    @property
    def states(self) -> list[TrialState]:
        return self.state.trials

    def publish(self, event: str, *details: Any) -> None:
        """Call the method of that name of every listener."""
        for listener in self._listeners:
            getattr(listener, event)(self, *details)

    def say(self, text: str) -> None:
        for listener in self._listeners:
            listener.say(text)

    def say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self.say(text)

    def folder_of(self, number: int) -> Path:
        """Where the processes of a trial write."""
        return storage(self.states[number].trial, self.folder)

    def address_of(self, number: int) -> str | None:
        """The place of a trial in object storage; None where it has none."""
        return trial_address(self.states[number].trial, self.folder)

    def open(self) -> None:
        """
        Raises:
            TrackingError: the store cannot be reached.
        """
        if self.plan.resumed:
            for state in self.states:
                restore_hydra_folder(state.trial)
        self._opened = True  # already: an interrupt in the middle of it closes what is open
        try:
            self.publish("opened")
        except UserError:
            self._opened = False
            raise

    @property
    def has_folder(self) -> bool:
        """Whether the folder is the one that the sweep was started in."""
        return all(path.exists() for path in self._mark)

    def check_folder(self) -> None:
        """
        Raises:
            FolderGone: the folder is not there any more.
        """
        if not self.has_folder:
            raise FolderGone(
                f"{self.folder} is gone: it was removed or moved while the sweep ran, so the sweep ends. What its "
                "trials reported is in MLflow. If you moved the folder, resume it there; else start a new sweep."
            )

    def has_more(self) -> bool:
        """Whether a trial is still to be begun."""
        return self.state.open or (self.plan.search is not None and self.plan.search.has_more())

    def next(self) -> int | None:
        """The number of the trial to begin next; None when there is none."""
        self.check_folder()
        while True:
            number = self.state.next_waiting()
            if number is None:
                number = self._suggested()
            if number is None:
                return None
            if not self.states[number].ended:  # what was just suggested may be skipped by its forecast
                self.states[number].move(TrialStatus.starting)
                return number

    def _suggested(self) -> int | None:
        search = self.plan.search
        if search is None:
            return None
        try:
            trial = search.next()
        finally:
            for note in search.notes():
                self.say(note)
        if trial is None:
            return None
        self._keep(trial)
        number = self.state.add(trial)
        self.publish("added", number)
        return number

    def _keep(self, trial: Trial) -> None:
        """Write a suggested trial down before it starts, so that a resume finds it."""
        clear_left_over(make_storage(trial, self.folder))
        write_hydra_folder(trial)
        add_trial(self.folder, trial)
        sync(self.folder / "trials.jsonl")

    def prepare(self, number: int) -> None:
        """Empty a trial's folder of what another command left there; one that goes on keeps what it has."""
        folder = make_storage(self.states[number].trial, self.folder)
        if self.states[number].goes_on:
            clear_attempt(folder)
        else:
            clear_left_over(folder)

    def begin(self, number: int) -> None:
        """A trial has its place. A second time when its process was killed and it is tried again."""
        state = self.states[number]
        if self._places_free_since and state.begun is None:
            state.place_free_since = self._places_free_since.pop(0)
        before = list(read_metrics(self.folder_of(number)))
        state.epochs_before = int(before[-1]["epoch"]) if before else 0
        state.begin(time.time())
        self._write_forecast(number)
        self.publish("began", number)

    def forecast(self, number: int, forecast: Forecast) -> None:
        """Keep the forecast of a trial."""
        state = self.states[number]
        state.forecast = forecast
        if state.begun is not None:
            self._write_forecast(number)
        self.publish("forecast", number)

    def _write_forecast(self, number: int) -> None:
        state = self.states[number]
        if figures := state.forecast_figures:
            with suppress(OSError):  # a full disk ends a trial where it loses results, not here
                write_json(self.folder_of(number) / "forecast.json", {**figures, **state.forecast_words}, parents=False)

    def is_training(self, number: int) -> bool:
        return self.states[number].ended or (self.folder_of(number) / "facts.json").exists()

    def is_through(self, number: int) -> bool:
        """Whether a trial has done all it was to do, though nobody waited for it."""
        state, folder = self.states[number], self.folder_of(number)
        epochs = [metrics["epoch"] for metrics in read_metrics(folder)]
        whole = bool(epochs) and epochs[-1] >= state.trial.config.training.epochs
        return whole and (not state.trial.config.export or exported(folder) is not None)

    def look(self, number: int) -> None:
        """Publish what the trial's folder has and the listeners have not."""
        folder, state = self.folder_of(number), self.states[number]
        if number not in self._facts_read and (facts := read_facts(folder)):
            self._facts_read.add(number)
            self.publish("facts", number, facts)
        for metrics in read_metrics(folder):
            if state.report(metrics):
                self._time_turnaround(number)
                self.publish("epoch", number, metrics)

    def _time_turnaround(self, number: int) -> None:
        state, folder = self.states[number], self.folder_of(number)
        first_step = read_progress(folder).get("first_step")
        if state.turnaround_s is None and state.place_free_since is not None and first_step is not None:
            state.turnaround_s = first_step - state.place_free_since
            with suppress(OSError):
                write_json(folder / "turnaround.json", {"turnaround_s": state.turnaround_s}, parents=False)

    def tick(self) -> None:
        """Called again and again while trials run. Raises as `check_folder`."""
        self.check_folder()
        self.publish("tick")

    def end(self, number: int, status: TrialStatus, error: str | None = None) -> None:
        """A trial has its result; or, interrupted, none yet."""
        state = self.states[number]
        if state.ended:
            return
        self.look(number)
        state.end(status, error, time.time())
        if status.is_result:
            self._write_outcome(number)
        self._places_free_since.append(read_progress(self.folder_of(number)).get("reported", time.time()))
        self._publish_end(number)

    def skip(self, number: int, error: str) -> None:
        """Record a trial that cannot fit, or is not among the most promising, without starting it."""
        folder = self.folder_of(number)
        folder.mkdir(parents=True, exist_ok=True)
        clear_left_over(folder)  # what another command left there is not this one's result
        self._end_unstarted(number, TrialStatus.skipped, error)

    def fail(self, number: int, error: str) -> None:
        """Record a trial of which it is known that it fails, without starting it."""
        self.states[number].move(TrialStatus.starting)
        self.prepare(number)
        self._end_unstarted(number, TrialStatus.failed, error)

    def _end_unstarted(self, number: int, status: TrialStatus, error: str) -> None:
        self.states[number].end(status, error, time.time())
        self._write_forecast(number)
        self._write_outcome(number)
        self._publish_end(number)

    def _publish_end(self, number: int) -> None:
        state = self.states[number]
        self.publish("ended", number)
        if self.plan.search is not None:
            self.plan.search.tell(state.trial, state.status, state.figures())

    def _write_outcome(self, number: int) -> None:
        state, folder = self.states[number], self.folder_of(number)
        if read_outcome(folder) is None:
            try:
                write_outcome(folder, Outcome(state.status, state.error, state.seconds))
            except OSError:
                self.say_once(f"{folder} cannot be written: a resume would try this trial again")

    def close(self, interrupted: bool, error: BaseException | None = None) -> ExitCode:
        """End what still runs, and let the listeners close; once, whoever comes first."""
        ending = Ending(self.state.exit_code(interrupted, error), error)
        if self.closed or not self._opened:
            return ending.code
        self.closed = True
        self.publish("closing", ending)
        reason = "its folder is gone" if isinstance(error, FolderGone) else str(error) if error else None
        for number, state in enumerate(self.states):
            if state.status is TrialStatus.running:
                self.end(number, TrialStatus.interrupted, reason)
        self.publish("closed", ending)
        self.publish("finish", ending)
        return ending.code
