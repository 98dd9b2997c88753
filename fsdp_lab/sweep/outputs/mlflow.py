"""The MLflow runs of a sweep: a parent, and a child for each trial, as the record has them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from fsdp_lab.config.status import TrialStatus
from fsdp_lab.config.sweep import Engine
from fsdp_lab.config.wording import count
from fsdp_lab.record.trial_files import TRIAL_FILES
from fsdp_lab.report.page import FILES
from fsdp_lab.report.render import reason_text
from fsdp_lab.sweep.grid import unescaped
from fsdp_lab.sweep.names import command_line, config_dir_words, resume_command, short_name, sweep_name
from fsdp_lab.sweep.sweep import Sweep
from fsdp_lab.sweep.trial import TrialState
from fsdp_lab.tracking import Projection, WantedRun
from fsdp_lab.tracking.tags import RECOMMENDED_TAG, RECORDED_TAG, SweepAnswer, sweep_tags, trial_params, trial_tags

_EARLY_LIMIT_S = 3.0  # when the sweep ends early


class MlflowRuns:
    """Returns what each run should hold, and which have changed; its `projection` sends the difference."""

    def __init__(self, sweep: Sweep) -> None:
        self._sweep, self._tracking = sweep, sweep.config.tracking
        self.projection = Projection(self._tracking, sweep.started.id, self._wanted, sweep.log)
        self._ended: dict[int, int] = {}  # number of a trial -> milliseconds since 1970
        self._is_ending = self._with_files = self._gave_up = False
        self._until: float | None = None  # of all waits at an early end, on the monotonic clock
        self._answer: SweepAnswer | None = None

    def open(self) -> None:
        """Make the store's schema, and send the sweep's run and what the store lacks of trials that have ended.

        Raises:
            TrackingError: the store cannot be reached.
        """
        self.projection.open(self._sweep.resumed)
        ended = [
            n for n, state in enumerate(self._sweep.trials)
            if state.ended and RECORDED_TAG not in self._tags_in_store(n)
        ]  # fmt: skip
        own = self.projection.stored(None)
        ended_before = own is not None and own.ended is not None and not self._sweep.has_more()
        self.change(*([] if ended_before else [None]), *ended)

    def note_ids(self) -> None:
        """Set the ids of the runs that the store has."""
        self._sweep.run_id = self.projection.run_id(None)
        for number, state in enumerate(self._sweep.trials):
            state.run_id = self.projection.run_id(number)

    def change(self, *numbers: int | None) -> None:
        """Send what is new of these trials; None: of the sweep, if it has its own run."""
        multirun = self._sweep.started.multirun
        self.projection.changed(*(number for number in numbers if number is not None or multirun))

    def changed(self, number: int) -> None:
        """Send what is new of a trial that has started. The first event of any other sends it."""
        state = self._sweep.trials[number]
        if state.status is TrialStatus.waiting:
            return
        if state.ended:
            self._ended.setdefault(number, int(time.time() * 1000))
        self.change(number)
        if self._sweep.config.engine is Engine.inline and self._sweep.ending is None:
            self.projection.settle(0.0)  # before this process continues to train, so that no step shares its core

    def settle(self) -> None:
        """End the sweep's run, and wait for the store: the report names the runs."""
        self._is_ending = True
        of_earlier_start = [
            n for n, state in enumerate(self._sweep.trials) if not state.ended and self.projection.run_id(n)
        ]
        self.change(None, *of_earlier_start)
        self._settle()

    def finish(self) -> None:
        """Send the sweep's files, and log how many runs are incomplete in the store."""
        self._with_files = True
        if self._sweep.started.multirun:
            self.change(None)
        elif self.projection.run_id(0):
            self.change(0)
        unsent = self._settle()
        self.projection.stop(self._left_s())
        if unsent:
            self._sweep.log(
                f"{count(unsent, 'run')} did not reach the MLflow store as a whole; the trials' folders have the rest; "
                f"to send it: {resume_command(self._sweep.folder)}"
            )

    def describe(self, answer: SweepAnswer) -> None:
        """Send the sweep's answer, which replaces an earlier one."""
        before, self._answer = self._answer, answer
        tagged = {n for n in range(len(self._sweep.trials)) if RECOMMENDED_TAG in self._tags_in_store(n)}
        self.change(None, *tagged, *(a.trial for a in (before, answer) if a and a.trial is not None))

    def _tags_in_store(self, number: int | None) -> Mapping[str, str]:
        run = self.projection.stored(number)
        return run.tags if run is not None else {}

    def _settle(self) -> int:
        patience_s = 0.0 if self._gave_up else self._tracking.patience_s
        unsent = self.projection.settle(patience_s, self._left_s())
        self._gave_up = unsent > 0
        return unsent

    def _left_s(self) -> float | None:
        """Return how long an end may still wait for the store, in all; None: without a limit."""
        if not self._sweep.ends_early:
            return None
        if self._until is None:
            self._until = min(time.monotonic() + _EARLY_LIMIT_S, self._sweep.ends_by or math.inf)
        return max(0.0, self._until - time.monotonic())

    def _wanted(self, number: int | None) -> WantedRun:
        return self._of_sweep() if number is None else self._of_trial(number, self._sweep.trials[number])

    def _of_sweep(self) -> WantedRun:
        sweep, answer = self._sweep, self._answer
        ending = sweep.ending if self._is_ending else None
        names: tuple[str, ...] = ("results.csv", "multirun.yaml")
        if ending is not None and not sweep.ends_early:
            names = (*names, *FILES)
        own = self.projection.stored(None)
        return WantedRun(
            sweep_name([state.trial for state in sweep.trials], sweep.swept),
            sweep_tags(sweep.folder, command_line()),
            {"num_trials": str(len(sweep.trials)), **(answer.tags(self._tags_in_store(None)) if answer else {})},
            figures=answer.metrics(own.figures if own else {}) if answer else {},
            files=[(sweep.folder / name, "") for name in names] if self._with_files else (),
            answer=answer.sentence if answer else "",
            status=TrialStatus[ending.name] if ending is not None else None,
            error=str(sweep.error) if ending is not None and sweep.error else None,
        )

    def _of_trial(self, number: int, state: TrialState) -> WantedRun:
        trial = state.trial
        words = [*config_dir_words(self._sweep.started.arguments), *map(unescaped, trial.words)]
        epochs = {int(metrics["epoch"]): state.figures_at(metrics) for metrics in list(state.epochs)}
        if state.forecast_figures:
            epochs[0] = state.forecast_figures
        tags = {"reason": str(state.reason.code)} if state.reason else {}
        if self._answer is not None:
            tags |= self._answer.tags_of_trial(number, self._tags_in_store(number))
        return WantedRun(
            short_name(trial, self._sweep.swept),
            trial_tags(trial.folder, words),
            tags,
            trial_params(trial.config, trial.choices, state.facts.get("world_size"), state.variables),
            epochs,
            facts={**state.facts, **state.forecast_words},
            files=list(_files(trial.folder, self._sweep.folder_of(number), state.ended)),
            status=state.status if state.ended else TrialStatus.interrupted if self._is_ending else None,
            error=reason_text(state.reason),
            ended=self._ended.get(number),
        )


def _files(own: Path, folder: Path, ended: bool) -> Iterator[tuple[Path, str]]:
    for name in ("config.yaml", "overrides.yaml"):
        yield own / ".hydra" / name, "config"
    if ended:
        for kind in (kind for kind in TRIAL_FILES if kind.artifact is not None):
            for path in sorted(folder.glob(kind.pattern)):
                yield path, kind.artifact or ("" if path.parent == folder else path.parent.name)
