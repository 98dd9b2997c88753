"""A sweep: its trials, and all that happens to them. Each change is in its folder before its outputs show it."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fsdp_lab.config import SweepConfig, UserError, objectives
from fsdp_lab.config.status import ExitCode, TrialStatus
from fsdp_lab.forecast.capacity import Forecast
from fsdp_lab.record.hydra_folder import write_hydra_folder, write_missing_hydra_folder
from fsdp_lab.record.paths import make_storage, storage, trial_address
from fsdp_lab.record.plain_loops import PlainLoop
from fsdp_lab.record.reasons import Code, Reason
from fsdp_lab.record.sweep_json import SweepStart
from fsdp_lab.record.trial_files import clear_attempt, clear_left_over, exported, read_metrics, write_error
from fsdp_lab.record.trial_json import Outcome, changing, read_trial, write_outcome
from fsdp_lab.record.trials_jsonl import add_trial, write_trials
from fsdp_lab.report.choice import pareto_front
from fsdp_lab.report.plain_check import check_against_plain
from fsdp_lab.storage.files import sync
from fsdp_lab.sweep.trial import Events, TrialState, in_rounds

if TYPE_CHECKING:
    from fsdp_lab.sweep.search import OptunaSearch


class Sweep:
    """A sweep, from its plan to its end.

    Attributes:
        trials: their states, in the order of their numbers; a search adds more.
        config: of the first trial, for the keys that all share; of the command while there is none.
        swept: the keys that differ between trials.
        started: what its start was given, and the code then.
        search: suggests more trials; None: a grid.
        resumed: whether the folder has trials of an earlier start; `config` is then that of the resume.
        objectives: `(metric, "min" or "max")` of each.
        plain_loops: with which its trials are compared.
        run_id: of its MLflow run; "": it has none.
        outputs: where each change is shown; set before it runs.
        ending: the exit status that it ends with; None while it runs.
        error: that ended it early, other than an interrupt; None: none did.
        interrupted_by: Ray's server that ended and so interrupted it; None: none did.
        ends_by: until when its end may wait, on the monotonic clock; None: it was not interrupted.
    """

    outputs: Events
    ending: ExitCode | None = None
    error: BaseException | None = None
    ends_by: float | None = None
    run_id = ""
    interrupted_by: str | None = None

    def __init__(
        self,
        trials: Sequence[TrialState],
        config: SweepConfig,
        folder: Path,
        swept: Sequence[str],
        started: SweepStart,
        search: OptunaSearch | None = None,
        resumed: bool = False,
        later: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.trials, self.folder, self._later = list(trials), folder, later
        self.config = trials[0].trial.config if trials and not resumed else config
        self.swept, self.started, self.search, self.resumed = swept, started, search, resumed
        self.objectives = objectives(self.config.objective)
        self.plain_loops: list[PlainLoop] = []
        self._queue = deque(in_rounds(self.trials))
        self._is_open = False
        self._logged: set[str] = set()

    def move(self, folder: Path) -> None:
        """Use another folder, before anything is written."""
        for state in self.trials:
            state.trial = replace(state.trial, folder=folder / os.path.relpath(state.trial.folder, self.folder))
        self.folder = folder

    @property
    def ends_early(self) -> bool:
        """Whether it ends before its trials."""
        return self.ending is ExitCode.interrupted or self.error is not None

    def has_more(self) -> bool:
        """Return whether a trial has not ended, or more may be suggested."""
        return any(not state.ended for state in self.trials) or (self.search is not None and self.search.has_more())

    def code(self) -> list[str]:
        """Return dotted paths to the user's code."""
        trials = (path for state in self.trials for path in state.trial.config.code())
        return sorted({*trials, *(self.search.code() if self.search is not None else ())})

    def config_of(self, number: int) -> SweepConfig:
        return self.trials[number].trial.config

    def folder_of(self, number: int) -> Path:
        """Return the folder that a trial's processes write to."""
        return storage(self.trials[number].trial, self.folder)

    def address_of(self, number: int) -> str | None:
        """Return the address of a trial in object storage; None without one."""
        return trial_address(self.trials[number].trial, self.folder)

    def front(self) -> set[int]:
        """Return the trials that no other beats in every objective; empty with a single objective."""
        if len(self.objectives) < 2:
            return set()
        finished = [i for i, state in enumerate(self.trials) if state.status is TrialStatus.finished]
        return {finished[i] for i in pareto_front([self.trials[i].figures for i in finished], self.objectives)}

    def log(self, text: str) -> None:
        self.outputs.log(text)

    def log_once(self, text: str) -> None:
        """Log a message for the user, unless it was logged before."""
        if text not in self._logged:
            self._logged.add(text)
            self.log(text)

    def open(self) -> None:
        """Open the outputs.

        Raises:
            TrackingError: the store cannot be reached.
        """
        if self.resumed:
            changed = [state for state in self.trials if state.trial.resumed and not state.ended]
            if changed:  # first: after a kill between the two, the next resume finds the difference again
                write_trials(self.folder, [state.trial for state in self.trials])
            for state in self.trials:
                (write_hydra_folder if state in changed else write_missing_hydra_folder)(state.trial)
        self._is_open = True  # already: an interrupt in the middle of it closes what is open
        try:
            self.outputs.opened()
        except UserError:
            self._is_open = False
            raise

    def next(self) -> int | None:
        """Return the number of the trial to start next; None if there is none now.

        Raises:
            OSError: the sweep's folder was removed.
        """
        self._check_folder()
        while (number := self.next_waiting()) is not None or (number := self._suggested()) is not None:
            if not self.trials[number].ended:  # what was just suggested may be skipped by its forecast
                self.trials[number].status = TrialStatus.starting
                return number
        return None

    def next_waiting(self) -> int | None:
        """Return the known trial to start next; None without one."""
        while self._queue and self.trials[self._queue[0]].status is not TrialStatus.waiting:
            self._queue.popleft()
        return self._queue[0] if self._queue else None

    def put_back(self, number: int) -> None:
        """Make a trial that was handed out, and has not ended, the next to start."""
        self.trials[number].status = TrialStatus.waiting
        self._queue.appendleft(number)

    def running(self) -> list[int]:
        """Return the trials that were handed out and have not ended, the last one first."""
        begun = (TrialStatus.starting, TrialStatus.running)
        return [number for number, state in enumerate(self.trials) if state.status in begun][::-1]

    def _suggested(self) -> int | None:
        """Return a new trial of the search, recorded before it starts, so that a resume finds it."""
        if self.search is None:
            return None
        try:
            trial = self.search.next()
        finally:
            for note in self.search.notes():
                self.log(note)
        if trial is None:
            return None
        trial = replace(trial, **self._later)
        clear_left_over(make_storage(trial, self.folder))
        write_hydra_folder(trial)
        add_trial(self.folder, trial)
        sync(self.folder / "trials.jsonl")
        number = len(self.trials)
        self.trials.append(TrialState(trial))
        self._queue.append(number)
        self.outputs.added(number)
        return number

    def prepare(self, number: int) -> None:
        """Remove files of another command from a trial's folder; a trial that resumes keeps its files."""
        folder = make_storage(self.trials[number].trial, self.folder)
        if self.trials[number].resuming:
            clear_attempt(folder)
        else:
            clear_left_over(folder)

    def begin(self, number: int) -> None:
        """Start a trial that has its resources; again after its process was killed."""
        state = self.trials[number]
        before = list(read_metrics(self.folder_of(number)))
        state.epochs_before = int(before[-1]["epoch"]) if before else 0
        state.status, state.begun = TrialStatus.running, state.begun or time.time()
        self._write_forecast(number)
        self.outputs.began(number)
        for metrics in before:
            self._record_epoch(number, metrics)

    def forecast(self, number: int, forecast: Forecast) -> None:
        state = self.trials[number]
        state.take_forecast(forecast)
        if state.begun is not None and not state.ended:
            self._write_forecast(number)
        self.outputs.changed(number)

    def _write_forecast(self, number: int) -> None:
        state = self.trials[number]
        # a full disk ends a trial elsewhere
        with suppress(OSError, UserError), changing(self.folder_of(number)) as trial:
            trial.forecast, trial.forecast_words = state.forecast_figures, state.forecast_words

    def read_facts(self, number: int) -> bool:
        """Read the facts of a trial, show them if they are new, and return whether there are any."""
        state, facts = self.trials[number], read_trial(self.folder_of(number)).facts
        if facts and facts != state.facts:
            state.facts = facts
            self.outputs.facts(number)
        return bool(facts)

    def epoch(self, number: int, report: Mapping[str, Any]) -> None:
        """Record an epoch's metrics from a report, which may have Tune's names. The trial's folder has them, too."""
        self.read_facts(number)
        metrics = {name: float(value) for name, value in report.items() if "/" in name or name == "step"}
        self._record_epoch(number, {"epoch": report["epoch"], **metrics})

    def _record_epoch(self, number: int, metrics: dict[str, float]) -> None:
        if self.trials[number].record_epoch(metrics):
            self.outputs.epoch(number, metrics)

    def tick(self) -> None:
        """Update what changes with time; called repeatedly while trials run. Raises as `next`."""
        self._check_folder()
        self.outputs.tick()

    def _check_folder(self) -> None:
        self.folder.joinpath("sweep.json").stat()  # Ray makes a removed folder again, without this file

    def write_stop(self, number: int, report: Mapping[str, Any]) -> None:
        """Write the outcome of a trial that its scheduler stops at the epoch of a report, unless the trial has one.

        The outcome is `finished` if all its work is done, because its own outcome was not awaited.
        """
        config = self.config_of(number)
        through = config.training.is_through(report["epoch"], report.get("step", 0))
        finished = through and (not config.export or exported(self.folder_of(number)) is not None)
        self._write_outcome(number, Outcome(TrialStatus.finished if finished else TrialStatus.stopped))

    def end(self, number: int, outcome: Outcome | None = None) -> None:
        """End a trial. An interrupted one has no result yet.

        Args:
            outcome: None: what its folder has.
        """
        state, folder = self.trials[number], self.folder_of(number)
        if state.ended:
            return
        self.read_facts(number)
        recorded = read_trial(folder)
        outcome = outcome or recorded.outcome or Outcome(TrialStatus.failed, Reason.of(Code.no_outcome))
        for metrics in read_metrics(folder):  # its process may have been killed before it reported one
            self._record_epoch(number, metrics)
        state.facts = state.facts or recorded.any_facts  # it may end before it has new ones
        self._end(number, outcome)

    def skip(self, number: int, reason: Reason) -> None:
        """Record a trial that cannot fit, or is not among the most promising, without starting it."""
        folder = self.folder_of(number)
        folder.mkdir(parents=True, exist_ok=True)
        clear_left_over(folder)  # what another command left there is not this one's result
        self._write_forecast(number)
        self._end(number, Outcome(TrialStatus.skipped, reason))

    def fail(self, number: int, reason: Reason, traceback: str = "") -> None:
        """Record a trial that is known to fail, without starting it; with a traceback if there is one."""
        self.prepare(number)
        if traceback:
            write_error(self.folder_of(number), traceback)
        self._write_forecast(number)
        self._end(number, Outcome(TrialStatus.failed, reason))

    def _end(self, number: int, outcome: Outcome) -> None:
        state, now = self.trials[number], time.time()
        state.status, state.reason = outcome.status, outcome.reason
        if state.begun:
            state.seconds, state.span = now - state.begun, (state.begun, now)
        if outcome.status.is_result:
            self._write_outcome(number, outcome)
        self.outputs.ended(number)
        if self.search is not None:
            self.search.report_result(state.trial, state.status, state.figures)

    def _write_outcome(self, number: int, outcome: Outcome) -> None:
        begun, folder, now = self.trials[number].begun, self.folder_of(number), time.time()
        try:
            write_outcome(folder, replace(outcome, seconds=now - begun if begun else None, ended=now))
        except (OSError, UserError) as error:
            cause = error.strerror if isinstance(error, OSError) else error
            self.log_once(f"{folder} cannot be written ({cause}): a resume will retry this trial")

    def close(self, interrupted: bool, error: BaseException | None = None) -> ExitCode:
        """End trials that still run, and close the outputs; only the first call does."""
        code = self.exit_code(interrupted, error)
        if self.ending is not None or not self._is_open:
            return code
        self.ending, self.error = code, error
        self.outputs.closing()
        reason = Reason.of(Code.sweep_failed, text=str(error)) if error else None
        for number, state in enumerate(self.trials):
            if state.status is TrialStatus.running:
                outcome = Outcome(TrialStatus.interrupted, reason)
                try:
                    self.end(number, outcome)
                except (OSError, UserError) as problem:  # a damaged file must not keep other trials from ending
                    self.log_once(str(problem))
                    self._end(number, outcome)
        self.outputs.closed()
        return code

    def exit_code(self, interrupted: bool, error: BaseException | None) -> ExitCode:
        """Return how the sweep ends: finished if every trial has a result, failed if one failed.

        It has failed, too, if all trials that were compared with a plain loop train another model.

        Args:
            error: that ended the sweep early, other than an interrupt; None: none did.
        """
        left = any(not state.ended for state in self.trials)
        if interrupted or (left and error is None):
            return ExitCode.interrupted
        failed = error is not None or any(state.status is TrialStatus.failed for state in self.trials)
        failed = failed or check_against_plain(self.trials, self.plain_loops).nothing_agrees
        return ExitCode.failed if failed else ExitCode.finished
