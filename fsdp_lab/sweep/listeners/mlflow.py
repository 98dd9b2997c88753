"""The MLflow runs of a sweep: a parent, and a child for each trial, as the record has them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from fsdp_lab.config.status import TrialStatus
from fsdp_lab.config.sweep import Engine, TrackingConfig
from fsdp_lab.config.wording import count
from fsdp_lab.record.trial_files import TRIAL_FILES
from fsdp_lab.report.reason_texts import reason_text
from fsdp_lab.report.write import FILES
from fsdp_lab.sweep.grid import unescaped
from fsdp_lab.sweep.listeners.console import Console
from fsdp_lab.sweep.names import command_line, config_dir_words, resume_command, short_name, sweep_name
from fsdp_lab.sweep.runner import Ending, Listener, SweepRun
from fsdp_lab.sweep.state import TrialState
from fsdp_lab.tracking import Projection, WantedRun
from fsdp_lab.tracking.tags import RECOMMENDED_TAG, RECORDED_TAG, SweepAnswer, sweep_tags, trial_params, trial_tags

_EARLY_LIMIT_S = 3.0  # when the sweep ends early


class MlflowRuns(Listener):
    """Says what each run should hold, and which have changed; `Projection` sends the difference."""

    def __init__(self, tracking: TrackingConfig, console: Console) -> None:
        self._tracking, self._log = tracking, console.log
        self._projection: Projection | None = None
        self._sweep: SweepRun | None = None
        self._ended: dict[int, int] = {}  # number of a trial -> milliseconds since 1970
        self._ending: Ending | None = None
        self._with_files = self._gave_up = False
        self._until: float | None = None  # of all waits at an early end, on the monotonic clock
        self._answer: SweepAnswer | None = None

    @property
    def parent_id(self) -> str:
        """The id of the sweep's own run; "" for a trial alone, and before the store has it."""
        return self._projection.run_id(None) if self._projection else ""

    @property
    def ui_url(self) -> str | None:
        """Where a UI lists the experiment's runs; None where no server is known."""
        return self._projection.ui_url if self._projection else None

    def run_id(self, number: int) -> str:
        """Return the id of a trial's run; "" while it has none."""
        return self._projection.run_id(number) if self._projection else ""

    def opened(self, sweep: SweepRun) -> None:
        """Make the store's schema, and let it get the sweep's run, and what it lacks of trials that have ended.

        Raises:
            TrackingError: the store cannot be reached.
        """
        record, states = sweep.plan.started, sweep.states
        self._sweep = sweep
        self._projection = Projection(self._tracking, record.id, self._wanted, self._log)
        self._projection.open(sweep.plan.resumed)
        ended = [n for n, state in enumerate(states) if state.ended and RECORDED_TAG not in self._tags_in_store(n)]
        own = self._projection.stored(None)
        ended_before = own is not None and own.ended is not None and not sweep.has_more()
        self._projection.changed(*([None] if record.multirun and not ended_before else []), *ended)

    def added(self, sweep: SweepRun, number: int) -> None:
        """Rename the sweep's run: its name counts the trials."""
        self._change(None)

    def changed(self, sweep: SweepRun, number: int) -> None:
        """Log what is new of a trial that has begun: of others it is logged with their first event."""
        state = sweep.states[number]
        if state.status is TrialStatus.waiting:
            return
        if state.ended:
            self._ended.setdefault(number, int(time.time() * 1000))
        self._change(number)
        if self._projection is not None and sweep.config.engine is Engine.inline and not sweep.closed:
            self._projection.settle(0.0)  # before this process trains on: a step shares no core

    def closed(self, sweep: SweepRun, ending: Ending) -> None:
        """End the sweep's run, and wait for the store: the report names the runs."""
        if self._projection is None:
            return
        self._ending = ending
        of_earlier_start = [n for n, state in enumerate(sweep.states) if not state.ended and self.run_id(n)]
        self._change(None, *of_earlier_start)
        self._settle(ending)

    def finish(self, sweep: SweepRun, ending: Ending) -> None:
        """Log the sweep's files, and how many runs the store lacks something of."""
        if self._projection is None:
            return
        self._with_files = True
        if sweep.plan.started.multirun or self.run_id(0):
            self._change(None if sweep.plan.started.multirun else 0)
        unsent = self._settle(ending)
        self._projection.stop(self._left_s(ending))
        if unsent:
            sweep.log(
                f"{count(unsent, 'run')} did not reach the MLflow store as a whole; the trials' folders have the rest; "
                f"to send it: {resume_command(sweep.folder)}"
            )

    def describe(self, answer: SweepAnswer) -> None:
        """Log the sweep's answer, instead of an earlier one."""
        before, self._answer = self._answer, answer
        if self._sweep is not None:
            tagged = {n for n in range(len(self._sweep.states)) if RECOMMENDED_TAG in self._tags_in_store(n)}
            self._change(None, *tagged, *(a.trial for a in (before, answer) if a and a.trial is not None))

    def _tags_in_store(self, number: int | None) -> Mapping[str, str]:
        run = self._projection.stored(number) if self._projection else None
        return run.tags if run is not None else {}

    def _change(self, *numbers: int | None) -> None:
        sweep = self._sweep
        if self._projection is not None and sweep is not None:
            self._projection.changed(*(n for n in numbers if n is not None or sweep.plan.started.multirun))

    def _settle(self, ending: Ending) -> int:
        assert self._projection is not None
        patience_s = 0.0 if self._gave_up else self._tracking.patience_s
        unsent = self._projection.settle(patience_s, self._left_s(ending))
        self._gave_up = unsent > 0
        return unsent

    def _left_s(self, ending: Ending) -> float | None:
        """Return how long an end may still wait for the store, in all; None: without a limit."""
        if not ending.early:
            return None
        if self._until is None:
            self._until = min(time.monotonic() + _EARLY_LIMIT_S, ending.by or math.inf)
        return max(0.0, self._until - time.monotonic())

    def _wanted(self, number: int | None) -> WantedRun:
        assert self._sweep is not None
        return self._of_sweep(self._sweep) if number is None else self._of_trial(self._sweep, number)

    def _of_sweep(self, sweep: SweepRun) -> WantedRun:
        trials = [state.trial for state in sweep.states]
        names: tuple[str, ...] = ("results.csv", "multirun.yaml")
        if self._ending is not None and not self._ending.early:
            names = (*names, *FILES)
        own = self._projection.stored(None) if self._projection else None
        answer, figures = self._answer, own.figures if own else {}
        return WantedRun(
            sweep_name(trials, sweep.plan.swept),
            sweep_tags(sweep.folder, command_line()),
            {"num_trials": str(len(trials)), **(answer.tags(self._tags_in_store(None)) if answer else {})},
            figures=answer.metrics(figures) if answer else {},
            files=[(sweep.folder / name, "") for name in names] if self._with_files else (),
            answer=answer.sentence if answer else "",
            status=TrialStatus[self._ending.code.name] if self._ending else None,
            error=str(self._ending.error) if self._ending and self._ending.error else None,
        )

    def _of_trial(self, sweep: SweepRun, number: int) -> WantedRun:
        state, record = sweep.states[number], sweep.plan.started
        trial, folder = state.trial, sweep.folder_of(number)
        words = [*config_dir_words(record.arguments), *map(unescaped, trial.overrides)]
        epochs = {int(metrics["epoch"]): state.figures_at(metrics) for metrics in list(state.epochs)}
        if state.forecast_figures:
            epochs[0] = state.forecast_figures
        facts = {**state.facts, **state.forecast_words}
        status = state.status if state.ended else TrialStatus.interrupted if self._ending else None
        return WantedRun(
            short_name(trial, sweep.plan.swept),
            trial_tags(trial.folder, words),
            self._tags_of(state, number),
            trial_params(trial.config, trial.choices, state.facts.get("world_size"), state.variables),
            epochs,
            facts=facts,
            files=list(self._files(trial.folder, folder, state.ended, number)),
            status=status,
            error=reason_text(state.reason),
            ended=self._ended.get(number),
        )

    def _tags_of(self, state: TrialState, number: int) -> dict[str, str]:
        tags = {"reason": str(state.reason.code)} if state.reason else {}
        return tags | (self._answer.tags_of_trial(number, self._tags_in_store(number)) if self._answer else {})

    def _files(self, own: Path, folder: Path, ended: bool, number: int) -> Iterator[tuple[Path, str]]:
        for name in ("config.yaml", "overrides.yaml"):
            yield own / ".hydra" / name, "config"
        if ended:
            for kind in (kind for kind in TRIAL_FILES if kind.artifact is not None):
                for path in sorted(folder.glob(kind.pattern)):
                    yield path, kind.artifact or ("" if path.parent == folder else path.parent.name)
