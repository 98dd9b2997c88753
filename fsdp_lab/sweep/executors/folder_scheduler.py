"""Lets a scheduler of Ray Tune's decide by what the trials' folders hold."""

from __future__ import annotations

import importlib
from typing import Any

from ray.tune.schedulers import TrialScheduler

from fsdp_lab.config import SweepConfig, stops_on
from fsdp_lab.config.registry import module_of
from fsdp_lab.engine.files import read_metrics
from fsdp_lab.sweep.runner import SweepRun


def build_scheduler(config: SweepConfig) -> TrialScheduler:
    """The scheduler of Ray Tune's that `scheduler=...` stands for, over the epochs that a trial has trained."""
    metric, mode = stops_on(config)
    module = importlib.import_module(module_of("scheduler.name", config.scheduler.name))
    scheduler: TrialScheduler = module.build_scheduler(config, {"time_attr": "epoch", "metric": metric, "mode": mode})
    return scheduler


class FolderScheduler(TrialScheduler):
    """Lets another scheduler decide, by the metrics in the trials' folders: Ray's report says only that there are more.

    What is through with its last epoch is not stopped: it has its model still to write.
    """

    def __init__(self, sweep: SweepRun, base: TrialScheduler) -> None:
        super().__init__()
        self._sweep, self._base = sweep, base
        self._decided: dict[int, float] = {}  # number of a trial -> the last epoch that was decided on

    def __getstate__(self) -> dict[str, Any]:
        """Tune keeps a copy on disk, which nobody reads."""
        return {}

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
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
        """What ended before its first epoch has no metrics: the median rule would fail every other trial over it."""
        reported = list(read_metrics(self._sweep.folder_of(trial.config["number"])))
        metric = self._base.metric
        if reported and (metric is None or metric in reported[-1]):
            self._base.on_trial_complete(tune_controller, trial, {**result, **reported[-1]})

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        self._base.on_trial_add(tune_controller, trial)

    def on_trial_error(self, tune_controller: Any, trial: Any) -> None:
        self._base.on_trial_error(tune_controller, trial)

    def on_trial_remove(self, tune_controller: Any, trial: Any) -> None:
        self._base.on_trial_remove(tune_controller, trial)

    def choose_trial_to_run(self, tune_controller: Any) -> Any:
        return self._base.choose_trial_to_run(tune_controller)

    def debug_string(self) -> str:
        return self._base.debug_string()
