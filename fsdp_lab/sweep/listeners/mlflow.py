"""The MLflow runs of a sweep: a parent, and a child for each trial. The only writer of the store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fsdp_lab.config.sweep import TrackingConfig
from fsdp_lab.metrics import PREDICTED_BY
from fsdp_lab.record.sweep import RECORD
from fsdp_lab.record.trial_files import read_any_facts, read_metrics
from fsdp_lab.report.thin import MOST
from fsdp_lab.report.uses import USE_FILES
from fsdp_lab.report.write import FILES
from fsdp_lab.status import TrialStatus
from fsdp_lab.sweep.grid import unescaped
from fsdp_lab.sweep.listeners.console import Console
from fsdp_lab.sweep.listeners.pace import Pace
from fsdp_lab.sweep.names import command_line, config_dir_words, resume_command, short_name, sweep_name
from fsdp_lab.sweep.runner import Ending, Listener, SweepRun
from fsdp_lab.sweep.state import TrialState
from fsdp_lab.tracking import Tracker
from fsdp_lab.tracking.tags import trial_params

# What a trial leaves in its folder -> where it stands among the artifacts of its run.
_EPOCHS = "metrics.jsonl"
_ARTIFACTS = (
    ("model.pt", "model"),
    ("model/*", "model"),
    (_EPOCHS, ""),
    ("error.txt", ""),
    ("failures*/*.json", "failures"),
    ("memory_*_rank*.*", "memory"),
    ("trace_rank*", "trace"),
)


class MlflowRuns(Listener):
    """Logs the sweep and its trials. While the store does not answer, writes wait: see `Tracker`.

    With more than `MOST` trials the runs are thinned: a run gets facts, forecast and the last epoch when its trial
    ends, and no copies of files that every trial has. The sweep's run has the parameters that its trials share. Each
    write takes milliseconds, and thousands of trials make many.
    """

    def __init__(self, tracking: TrackingConfig, console: Console) -> None:
        self._tracker = Tracker(tracking, on_problem=console.log)
        self._patience_s = tracking.patience_s
        self._handles: dict[int, str] = {}  # number of a trial -> its run
        self._reopened: set[int] = set()
        self._parent: str | None = None
        self._names, self._renamed = Pace(), True
        self._shared: dict[str, str] | None = None  # parameters that the sweep's run has, where the others are thinned
        self._parent_ended: int | None = None

    @property
    def parent_id(self) -> str:
        """The id of the sweep's own run; "" for a trial alone, and before the store has it."""
        return self._tracker.run_id(self._parent)

    @property
    def ui_url(self) -> str | None:
        """Where a UI lists the experiment's runs; None where no server is known."""
        return self._tracker.ui_url

    def run_id(self, number: int) -> str:
        """Return the id of a trial's run; "" while it has none."""
        return self._tracker.run_id(self._handles.get(number))

    def opened(self, sweep: SweepRun) -> None:
        """Make the store's schema and the parent run. For a resumed sweep, send what the store lacks.

        Raises:
            TrackingError: the store cannot be reached.
        """
        self._tracker.open()
        record = sweep.plan.record
        runs = self._tracker.find_runs(record.id) if sweep.plan.resumed else {}
        if record.multirun:
            if "" in runs:
                self._parent = runs[""].handle
                if sweep.has_more():
                    self._tracker.reopen(self._parent)
                else:  # it ended when it ended; where its driver was killed before, with its last trial
                    ends = [run.ended for run in runs.values() if run.ended]
                    self._parent_ended = runs[""].ended or max(ends, default=None)
            else:
                name, count = self._name_of(sweep), len(sweep.states)
                self._parent = self._tracker.start_sweep(
                    name, sweep.folder, command_line(), count, record.id, _is_thinned(sweep)
                )
        for number, state in enumerate(sweep.states):
            run = runs.get(str(number))
            if run is not None and state.again:
                self._tracker.set_aside(run.handle)
            elif run is not None:
                self._handles[number] = run.handle
                if not run.recorded:
                    self._log_config(sweep, number)
            if state.ended and (run is None or not run.recorded):
                self._send_again(sweep, number, run.ended if run else None)

    @staticmethod
    def _name_of(sweep: SweepRun) -> str:
        return sweep_name([state.trial for state in sweep.states], sweep.plan.swept)

    def _send_again(self, sweep: SweepRun, number: int, ended: int | None) -> None:
        """Send everything in the folder of an ended trial. Its end is the time that its run has, if any."""
        if number in self._handles:
            self._tracker.check_epochs(self._handles[number])
        folder = sweep.folder_of(number)
        if not _is_thinned(sweep):
            if facts := read_any_facts(folder):
                self._tracker.log_facts(self._run_of(sweep, number), facts)
            self._log_forecast(sweep, number)
            for metrics in read_metrics(folder):
                self._tracker.log_epoch(self._run_of(sweep, number), sweep.states[number].figures_at(metrics))
        self._finish(sweep, number, ended)

    def added(self, sweep: SweepRun, number: int) -> None:
        """Rename the sweep's run: its name counts the trials. With many trials, at a limited rate."""
        self._renamed = False
        if not _is_thinned(sweep) or self._names.is_due:
            self._rename(sweep)

    def _rename(self, sweep: SweepRun) -> None:
        self._renamed = True
        if self._parent:
            with self._names.kept():
                self._tracker.name_sweep(self._parent, self._name_of(sweep), len(sweep.states), _is_thinned(sweep))

    def began(self, sweep: SweepRun, number: int) -> None:
        """Start the run of a trial, or reopen that of one that resumes, and log its forecast."""
        if number in self._handles and sweep.states[number].resuming and number not in self._reopened:
            self._reopened.add(number)
            self._tracker.reopen(self._handles[number])
        if _is_thinned(sweep):
            self._run_of(sweep, number)
        else:
            self._log_forecast(sweep, number)

    def facts(self, sweep: SweepRun, number: int, facts: dict[str, Any]) -> None:
        """Log the facts of a trial, unless its run is thinned."""
        if not _is_thinned(sweep):
            self._tracker.log_facts(self._run_of(sweep, number), facts)

    def forecast(self, sweep: SweepRun, number: int) -> None:
        """Log the forecast of a trial whose run exists, unless it is thinned."""
        if number in self._handles and not _is_thinned(sweep):  # else it is logged when the trial begins, or ends
            self._log_forecast(sweep, number)

    def epoch(self, sweep: SweepRun, number: int, metrics: dict[str, float]) -> None:
        """Log the metrics of an epoch, unless the run is thinned."""
        if not _is_thinned(sweep):
            self._tracker.log_epoch(self._run_of(sweep, number), sweep.states[number].figures_at(metrics))

    def ended(self, sweep: SweepRun, number: int) -> None:
        """End the run of a trial."""
        if sweep.states[number].begun is None and not _is_thinned(sweep):
            self._log_forecast(sweep, number)  # of a trial that is skipped
        self._finish(sweep, number)

    def closed(self, sweep: SweepRun, ending: Ending) -> None:
        """End the runs of trials without a result as interrupted, and the sweep's run."""
        for number, handle in self._handles.items():
            if not sweep.states[number].ended:  # of an earlier start, whose end may not have been logged
                self._tracker.finish(handle, TrialStatus.interrupted)
        if not self._renamed:
            self._rename(sweep)
        if self._parent:
            error = str(ending.error) if ending.error else None
            self._tracker.finish(self._parent, TrialStatus[ending.code.name], error, self._parent_ended)

    def finish(self, sweep: SweepRun, ending: Ending) -> None:
        """Log the sweep's files, send waiting writes, and log how many remain."""
        if run := self._parent or self._handles.get(0):
            reports = () if ending.early else (*FILES, *USE_FILES)
            for name in ("results.csv", "multirun.yaml", RECORD, *reports) if self._parent else (RECORD,):
                if (sweep.folder / name).exists():
                    self._tracker.log_artifact(run, sweep.folder / name)
        if unsent := self._tracker.settle(0.0 if ending.early else self._patience_s):
            sweep.log(
                f"{unsent} writes did not reach the MLflow store; the trials' folders keep them; to send them: "
                f"{resume_command(sweep.folder)}"
            )

    def describe(self, answer: str) -> None:
        """Replace the beginning of the sweep run's description by its answer."""
        if self._parent:
            self._tracker.describe_sweep(self._parent, answer)

    def _run_of(self, sweep: SweepRun, number: int) -> str:
        """Return the handle of a trial's run, starting the run if necessary."""
        if number not in self._handles:
            trial = sweep.states[number].trial
            name = short_name(trial, sweep.plan.swept)
            words = [*config_dir_words(sweep.plan.record.arguments), *map(unescaped, trial.overrides)]
            self._handles[number] = self._tracker.start_trial(
                name, words, trial.folder, self._parent, sweep.plan.record.id, str(number), _is_thinned(sweep)
            )
            self._log_config(sweep, number)
        return self._handles[number]

    def _log_config(self, sweep: SweepRun, number: int) -> None:
        trial, run, resumed = sweep.states[number].trial, self._handles[number], sweep.plan.resumed
        if not _is_thinned(sweep) or self._parent is None:
            self._tracker.log_config(run, trial.config, trial.choices, trial.folder, resumed)
            return
        if self._shared is None:
            self._shared = _shared_params(sweep)
            self._tracker.log_params(self._parent, self._shared, resumed)
        folder = trial.folder if number == 0 else None  # a report from the store reads the first trial's files
        self._tracker.log_config(run, trial.config, trial.choices, folder, resumed, self._shared)

    def _log_forecast(self, sweep: SweepRun, number: int) -> None:
        run = self._run_of(sweep, number)
        if figures := sweep.states[number].forecast_figures:
            self._tracker.log_epoch(run, {"epoch": 0.0, **figures})
        if basis := sweep.states[number].predicted_by:
            self._tracker.log_facts(run, {PREDICTED_BY: basis})

    def _finish(self, sweep: SweepRun, number: int, ended: int | None = None) -> None:
        state, folder, run = sweep.states[number], sweep.folder_of(number), self._run_of(sweep, number)
        thinned = _is_thinned(sweep)
        if thinned:
            self._log_last(sweep, number)
        facts = _facts_of(state, folder) if thinned else None
        files = [
            (path, "/".join(part for part in (where, *path.relative_to(folder).parts[1:-1]) if part))
            for pattern, where in _ARTIFACTS
            if not (thinned and pattern == _EPOCHS)
            for path in sorted(folder.glob(pattern))
        ]
        complete = state.status.is_result and not files
        # the end first: a file that the store does not take must not leave the run open
        self._tracker.finish(run, state.status, state.error, ended, facts=facts, complete=complete)
        for path, inside in files:
            self._tracker.log_artifact(run, path, inside)
        if state.status.is_result and not complete:
            self._tracker.recorded(run)

    def _log_last(self, sweep: SweepRun, number: int) -> None:
        """Log what a thinned run has of the metrics of an ended trial: its forecast and its last epoch."""
        forecast, last = sweep.states[number].forecast_figures, sweep.states[number].figures
        epochs = [{"epoch": 0.0, **forecast}] if forecast else []
        if epochs := [*epochs, *([last] if "epoch" in last else [])]:
            self._tracker.log_epoch(self._run_of(sweep, number), *epochs)


def _facts_of(state: TrialState, folder: Path) -> dict[str, Any]:
    """Return the facts of a trial, and the basis of its predicted speed, as far as they are known."""
    return {**(read_any_facts(folder) or {}), **({PREDICTED_BY: state.predicted_by} if state.predicted_by else {})}


def _shared_params(sweep: SweepRun) -> dict[str, str]:
    """Return the parameters of a sweep's first trial, except for groups and what is swept, which each run has."""
    first = sweep.states[0].trial
    own = {key.lstrip("+") for key in sweep.plan.swept} | first.choices.keys()
    return {key: value for key, value in trial_params(first.config, first.choices).items() if key not in own}


def _is_thinned(sweep: SweepRun) -> bool:
    """Return whether a sweep has, or its search will suggest, more trials than MLflow gets in full."""
    search = sweep.config.search
    return max(len(sweep.states), search.num_trials if search.samples else 0) > MOST
