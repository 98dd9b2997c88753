"""A sweep from its first trial to its last: an executor runs the trials, listeners publish the results."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from fsdp_lab.config import SweepConfig, UserError
from fsdp_lab.config.compose import Trial
from fsdp_lab.config.machine import ray_folder
from fsdp_lab.config.status import ExitCode, TrialStatus
from fsdp_lab.config.sweep import Engine
from fsdp_lab.config.wording import count
from fsdp_lab.engine.cluster import start_ray
from fsdp_lab.forecast.capacity import Forecast
from fsdp_lab.record.hydra_folder import write_hydra_folder, write_missing_hydra_folder
from fsdp_lab.record.paths import make_storage, storage, trial_address
from fsdp_lab.record.reasons import Code, Reason
from fsdp_lab.record.sweep_json import SweepStart
from fsdp_lab.record.trial_files import clear_attempt, clear_left_over, exported, read_metrics, write_error
from fsdp_lab.record.trial_json import Outcome, changing, read_trial, write_outcome
from fsdp_lab.record.trials_jsonl import add_trial
from fsdp_lab.storage.files import sync
from fsdp_lab.sweep.search import OptunaSearch
from fsdp_lab.sweep.shutdown import interruptible
from fsdp_lab.sweep.state import SweepState, TrialState

_CHANGES = ("began", "facts", "forecast", "epoch", "ended")  # events of a trial


@dataclass(frozen=True)
class SweepPlan:
    """The plan of a sweep.

    Attributes:
        state: the trials that are known at first; a search adds its own.
        config: of any trial, for the keys that all share.
        swept: the keys that differ between trials.
        started: what its start was given, and the code then.
        search: suggests more trials; None: a grid.
        resumed: whether the folder has trials of an earlier start.
    """

    state: SweepState
    config: SweepConfig
    folder: Path
    swept: Sequence[str]
    started: SweepStart
    search: OptunaSearch | None = None
    resumed: bool = False

    def has_more(self) -> bool:
        return self.state.open or (self.search is not None and self.search.has_more())

    def code(self) -> list[str]:
        """Return dotted paths to the user's code."""
        trials = (path for state in self.state.trials for path in state.trial.config.code())
        return sorted({*trials, *(self.search.code() if self.search is not None else ())})


def reach_cluster(plan: SweepPlan) -> None:
    """Reach the Ray at `cluster.address` before the sweep writes anything anywhere.

    Raises:
        UserError: no Ray answers there, or not to this process's token; or none can be started here.
    """
    cluster = plan.config.cluster
    if plan.config.engine is not Engine.ray or not plan.has_more():
        return
    if cluster.address is None:
        ray_folder()  # which checks it
    else:
        print(f"connecting to Ray at {cluster.address}", flush=True)
        start_ray(cluster, plan.code())


class Listener:
    """Receives the events of a sweep, each after the sweep's own state and files have it.

    Entered before anything starts, left after everything has ended. Only `opened` may raise.
    """

    def __enter__(self) -> Listener:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def opened(self, sweep: SweepRun) -> None:
        """Handle the opening of the sweep, before anything has started. A `UserError` from here ends the sweep."""

    def ready(self, sweep: SweepRun) -> None:
        """Handle the readiness of the executor, which has begun no trial."""

    def added(self, sweep: SweepRun, number: int) -> None:
        """Handle a trial that a search has suggested."""

    def began(self, sweep: SweepRun, number: int) -> None:
        """Handle the start of a trial; a second one after its process was killed."""

    def facts(self, sweep: SweepRun, number: int, facts: dict[str, Any]) -> None:
        """Handle the facts of a trial that is about to take its first step: its device, its data."""

    def forecast(self, sweep: SweepRun, number: int) -> None:
        """Handle the forecast of a trial."""

    def epoch(self, sweep: SweepRun, number: int, metrics: dict[str, float]) -> None:
        """Handle a finished epoch of a trial."""

    def ended(self, sweep: SweepRun, number: int) -> None:
        """Handle the end of a trial. An interrupted one has no result yet."""

    def changed(self, sweep: SweepRun, number: int) -> None:
        """Handle a change of a trial, after the event's own method: one of `_CHANGES`."""

    def tick(self, sweep: SweepRun) -> None:
        """Handle the passing of time: called several times a second while trials run."""

    def closing(self, sweep: SweepRun, ending: Ending) -> None:
        """Handle the end of the sweep; trials that still run are ended after this."""

    def closed(self, sweep: SweepRun, ending: Ending) -> None:
        """Handle the end of every trial that ran."""

    def finish(self, sweep: SweepRun, ending: Ending) -> None:
        """Do what needs the files of other listeners, after all have closed."""

    def log(self, text: str) -> None:
        """Handle a message for the user."""


@dataclass(frozen=True)
class Ending:
    """How a sweep ends.

    Attributes:
        code: its exit status.
        error: that ended it early, other than an interrupt; None: none did.
        by: when all waits are over, on the monotonic clock, after an interrupt; None: there is no hurry.
    """

    code: ExitCode
    error: BaseException | None = None
    by: float | None = None

    @property
    def early(self) -> bool:
        """Whether it ends before its trials."""
        return self.code is ExitCode.interrupted or self.error is not None


class Executor(Protocol):
    """Runs the trials that `SweepRun.next` gives."""

    @property
    def interrupted_by(self) -> str | None:
        """The executor's server that ended by itself and so interrupted the sweep; None: none did."""

    def start(self, sweep: SweepRun) -> None:
        """Prepare what trials need.

        Raises:
            UserError: it is not available.
        """

    def run(self, sweep: SweepRun) -> None:
        """Run trials until there are no more."""

    def stop(self) -> None:
        """End everything that `start` started."""


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
            else:
                failed = sum(state.status is TrialStatus.failed for state in sweep.states)
                ended = (
                    "the trial has a result"
                    if len(sweep.states) == 1
                    else f"all {len(sweep.states)} trials have a result"
                )
                if failed:
                    ended = (
                        f"{failed} of {count(len(sweep.states), 'trial')} failed; add resume_failed=true to train again"
                    )
                sweep.log(f"nothing to do: {ended}")
        except KeyboardInterrupt:
            interrupted = True
            lost = executor.interrupted_by
            sweep.log(f"{lost} has ended: it was killed" if lost else "interrupted")
        except BaseException as caught:
            error = caught
            raise
        finally:
            # before the executor stops: that takes seconds, and people press Ctrl-C twice
            try:
                code = sweep.close(interrupted, error)
            finally:
                executor.stop()
    return code


class SweepRun:
    """A sweep while it runs: keeps its state and its folder, and publishes each change to the listeners."""

    def __init__(self, plan: SweepPlan, listeners: Sequence[Listener]) -> None:
        self.plan, self.config, self.folder = plan, plan.config, plan.folder
        self.state = plan.state
        self.closed = False
        self.ends_by: float | None = None
        self._is_recorded = (self.folder / "sweep.json").exists()
        self._listeners = listeners
        self._opened = False
        self._logged: set[str] = set()
        self._facts_read = {number for number, state in enumerate(plan.state.trials) if state.ended}

    @property
    def states(self) -> list[TrialState]:
        return self.state.trials

    def publish(self, event: str, *details: Any) -> None:
        """Call the method of that name of every listener."""
        for listener in self._listeners:
            getattr(listener, event)(self, *details)
            if event in _CHANGES:
                listener.changed(self, details[0])

    def log(self, text: str) -> None:
        for listener in self._listeners:
            listener.log(text)

    def log_once(self, text: str) -> None:
        """Log a message for the user, unless it was logged before."""
        if text not in self._logged:
            self._logged.add(text)
            self.log(text)

    def config_of(self, number: int) -> SweepConfig:
        return self.states[number].trial.config

    def folder_of(self, number: int) -> Path:
        """Return the folder that a trial's processes write to."""
        return storage(self.states[number].trial, self.folder)

    def address_of(self, number: int) -> str | None:
        """Return the address of a trial in object storage; None without one."""
        return trial_address(self.states[number].trial, self.folder)

    def open(self) -> None:
        """Open the listeners.

        Raises:
            TrackingError: the store cannot be reached.
            UserError: object storage refuses, or does not answer.
        """
        if self.plan.resumed:
            for state in self.states:
                write_missing_hydra_folder(state.trial)
        self._opened = True  # already: an interrupt in the middle of it closes what is open
        try:
            self.publish("opened")
        except UserError:
            self._opened = False
            raise

    def has_more(self) -> bool:
        return self.plan.has_more()

    def next(self) -> int | None:
        """Return the number of the trial to begin next; None if there is none now.

        Raises:
            OSError: the sweep's folder was removed.
        """
        self._check_folder()
        while True:
            number = self.state.next_waiting()
            if number is None:
                number = self._suggested()
            if number is None:
                return None
            if not self.states[number].ended:  # what was just suggested may be skipped by its forecast
                self.states[number].status = TrialStatus.starting
                return number

    def _suggested(self) -> int | None:
        search = self.plan.search
        if search is None:
            return None
        try:
            trial = search.next()
        finally:
            for note in search.notes():
                self.log(note)
        if trial is None:
            return None
        self._keep(trial)
        number = self.state.add(trial)
        self.publish("added", number)
        return number

    def _keep(self, trial: Trial) -> None:
        """Record a suggested trial before it starts, so that a resume finds it."""
        clear_left_over(make_storage(trial, self.folder))
        write_hydra_folder(trial)
        add_trial(self.folder, trial)
        sync(self.folder / "trials.jsonl")

    def prepare(self, number: int) -> None:
        """Remove files of another command from a trial's folder; a trial that resumes keeps its files."""
        folder = make_storage(self.states[number].trial, self.folder)
        if self.states[number].resuming:
            clear_attempt(folder)
        else:
            clear_left_over(folder)

    def begin(self, number: int) -> None:
        """Begin a trial that has its resources; a second time after its process was killed."""
        state = self.states[number]
        before = list(read_metrics(self.folder_of(number)))
        state.epochs_before = int(before[-1]["epoch"]) if before else 0
        state.begin(time.time())
        self._write_forecast(number)
        self.publish("began", number)
        for metrics in before:
            self._record_epoch(number, metrics)

    def forecast(self, number: int, forecast: Forecast) -> None:
        state = self.states[number]
        state.take_forecast(forecast)
        if state.begun is not None:
            self._write_forecast(number)
        self.publish("forecast", number)

    def _write_forecast(self, number: int) -> None:
        state = self.states[number]
        with suppress(OSError), changing(self.folder_of(number)) as trial:  # a full disk ends a trial elsewhere
            trial.forecast, trial.forecast_words = state.forecast_figures, state.forecast_words

    def has_facts(self, number: int) -> bool:
        """Return whether a trial has written its facts, which are read and published once."""
        if number not in self._facts_read and (facts := read_trial(self.folder_of(number)).facts):
            self._facts_read.add(number)
            self.states[number].facts = facts
            self.publish("facts", number, facts)
        return number in self._facts_read

    def epoch(self, number: int, report: Mapping[str, Any]) -> None:
        """Take the metrics of an epoch, which the trial's folder has too, from a report that may have Tune's names."""
        self.has_facts(number)
        metrics = {name: float(value) for name, value in report.items() if "/" in name or name == "step"}
        self._record_epoch(number, {"epoch": report["epoch"], **metrics})

    def _record_epoch(self, number: int, metrics: dict[str, float]) -> None:
        if self.states[number].record_epoch(metrics):
            self.publish("epoch", number, metrics)

    def write_stop(self, number: int, report: Mapping[str, Any]) -> None:
        """Write the outcome of a trial that its scheduler stops at the epoch of a report, unless the trial has one.

        It has finished if all its work is done, though nobody waited for it.
        """
        config = self.config_of(number)
        through = config.training.is_through(report["epoch"], report.get("step", 0))
        finished = through and (not config.export or exported(self.folder_of(number)) is not None)
        self._write_outcome(number, Outcome(TrialStatus.finished if finished else TrialStatus.stopped))

    def tick(self) -> None:
        """Let time pass for the listeners: called repeatedly while trials run. Raises as `next`."""
        self._check_folder()
        self.publish("tick")

    def _check_folder(self) -> None:
        if self._is_recorded:
            (self.folder / "sweep.json").stat()  # Ray makes a removed folder again, without this file

    def end(self, number: int, outcome: Outcome | None = None) -> None:
        """End a trial. An interrupted one has no result yet.

        Args:
            outcome: None: what its folder has.
        """
        state, folder = self.states[number], self.folder_of(number)
        if state.ended:
            return
        self.has_facts(number)
        recorded = read_trial(folder)
        outcome = outcome or recorded.outcome or Outcome(TrialStatus.failed, Reason.of(Code.no_outcome))
        for metrics in read_metrics(folder):  # its process may have been killed before it reported one
            self._record_epoch(number, metrics)
        state.facts = state.facts or recorded.any_facts  # it may end before it has new ones
        state.end(outcome, time.time())
        if outcome.status.is_result:
            self._write_outcome(number, outcome)
        self._publish_end(number)

    def skip(self, number: int, reason: Reason) -> None:
        """Record a trial that cannot fit, or is not among the most promising, without starting it."""
        folder = self.folder_of(number)
        folder.mkdir(parents=True, exist_ok=True)
        clear_left_over(folder)  # what another command left there is not this one's result
        self._end_unstarted(number, Outcome(TrialStatus.skipped, reason))

    def fail(self, number: int, reason: Reason, traceback: str = "") -> None:
        """Record a trial of which it is known that it fails, without starting it; with a traceback if there is one."""
        self.states[number].status = TrialStatus.starting
        self.prepare(number)
        if traceback:
            write_error(self.folder_of(number), traceback)
        self._end_unstarted(number, Outcome(TrialStatus.failed, reason))

    def _end_unstarted(self, number: int, outcome: Outcome) -> None:
        self.states[number].end(outcome, time.time())
        self._write_forecast(number)
        self._write_outcome(number, outcome)
        self._publish_end(number)

    def _publish_end(self, number: int) -> None:
        state = self.states[number]
        self.publish("ended", number)
        if self.plan.search is not None:
            self.plan.search.report_result(state.trial, state.status, state.figures)

    def _write_outcome(self, number: int, outcome: Outcome) -> None:
        begun, folder, now = self.states[number].begun, self.folder_of(number), time.time()
        try:
            write_outcome(folder, replace(outcome, seconds=now - begun if begun else None, ended=now))
        except OSError as error:
            self.log_once(f"{folder} cannot be written ({error.strerror}): a resume will retry this trial")

    def close(self, interrupted: bool, error: BaseException | None = None) -> ExitCode:
        """End trials that still run, and close the listeners; only the first call does."""
        ending = Ending(self.state.exit_code(interrupted, error), error, self.ends_by)
        if self.closed or not self._opened:
            return ending.code
        self.closed = True
        self.publish("closing", ending)
        reason = Reason.of(Code.sweep_failed, text=str(error)) if error else None
        for number, state in enumerate(self.states):
            if state.status is TrialStatus.running:
                self.end(number, Outcome(TrialStatus.interrupted, reason))
        self.publish("closed", ending)
        self.publish("finish", ending)
        return ending.code
