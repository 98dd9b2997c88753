"""Lets a scheduler of Ray Tune's decide by the content of the trials' folders."""

from __future__ import annotations

import importlib
from typing import Any

from ray.tune.schedulers import TrialScheduler

from fsdp_lab.config import SweepConfig, stops_on
from fsdp_lab.config.registry import module_of
from fsdp_lab.engine.trial_files import read_metrics
from fsdp_lab.sweep.runner import SweepRun


def build_scheduler(config: SweepConfig) -> TrialScheduler:
    """Return Ray Tune's scheduler for `scheduler=...`, which counts the epochs that a trial has trained."""
    metric, mode = stops_on(config)
    module = importlib.import_module(module_of("scheduler.name", config.scheduler.name))
    scheduler: TrialScheduler = module.build_scheduler(config, {"time_attr": "epoch", "metric": metric, "mode": mode})
    return scheduler


class FolderScheduler(TrialScheduler):
    """Lets another scheduler decide by the metrics in the trials' folders. Ray's report only says that there are some.

    A trial that has finished its last epoch is not stopped, because it still has to export its model.
    """

    def __init__(self, sweep: SweepRun, base: TrialScheduler) -> None:
        super().__init__()
        self._sweep, self._base = sweep, base
        self._decided: dict[int, float] = {}  # number of a trial -> the last epoch that was decided on

    def __getstate__(self) -> dict[str, Any]:
        """Return nothing: Tune keeps a copy on disk, which is never read."""
        return {}

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """Return the other scheduler's decision about each new epoch."""
        number = trial.config["number"]
        training = self._sweep.states[number].trial.config.training
        for metrics in read_metrics(self._sweep.folder_of(number)):
            epoch = metrics["epoch"]
            if epoch <= self._decided.get(number, 0):
                continue
            self._decided[number] = epoch
            if epoch >= training.epochs or (training.max_steps is not None and metrics["step"] >= training.max_steps):
                continue
            decision = self._base.on_trial_result(tune_controller, trial, {**result, **metrics})
            if decision != TrialScheduler.CONTINUE:
                return decision
        return TrialScheduler.CONTINUE

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        """Pass a trial on that has metrics.

        One that ended before its first epoch would fail all others in the median rule.
        """
        reported = list(read_metrics(self._sweep.folder_of(trial.config["number"])))
        metric = self._base.metric
        if reported and (metric is None or metric in reported[-1]):
            self._base.on_trial_complete(tune_controller, trial, {**result, **reported[-1]})

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        """Pass the trial on."""
        self._base.on_trial_add(tune_controller, trial)

    def on_trial_error(self, tune_controller: Any, trial: Any) -> None:
        """Pass the trial on."""
        self._base.on_trial_error(tune_controller, trial)

    def on_trial_remove(self, tune_controller: Any, trial: Any) -> None:
        """Pass the trial on."""
        self._base.on_trial_remove(tune_controller, trial)

    def choose_trial_to_run(self, tune_controller: Any) -> Any:
        """Return the other scheduler's choice."""
        return self._base.choose_trial_to_run(tune_controller)

    def debug_string(self) -> str:
        """Return the other scheduler's text."""
        return self._base.debug_string()
