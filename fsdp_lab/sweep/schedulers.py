"""The schedulers of `scheduler=...`: which trials Ray Tune stops early."""

from __future__ import annotations

from typing import Any

from hydra.utils import get_method
from ray.tune.schedulers import AsyncHyperBandScheduler, FIFOScheduler, MedianStoppingRule, TrialScheduler

from fsdp_lab.config import SweepConfig, stops_on
from fsdp_lab.config.options import path_of


def build_scheduler(config: SweepConfig) -> TrialScheduler:
    """Return Ray Tune's scheduler for `scheduler=...`, which counts the epochs that a trial has trained."""
    metric, mode = stops_on(config)
    build = get_method(path_of("scheduler.name", config.scheduler.name))
    scheduler: TrialScheduler = build(config, {"time_attr": "epoch", "metric": metric, "mode": mode})
    return scheduler


def fifo(config: SweepConfig, watched: dict[str, Any]) -> TrialScheduler:
    """Return a scheduler that stops no trial early."""
    return FIFOScheduler()


def asha(config: SweepConfig, watched: dict[str, Any]) -> TrialScheduler:
    """Return a scheduler that keeps one trial in `scheduler.reduction_factor` at each rung."""
    settings = config.scheduler
    return AsyncHyperBandScheduler(
        max_t=max(config.training.epochs, settings.grace_epochs) + 1,
        grace_period=settings.grace_epochs,
        reduction_factor=settings.reduction_factor,
        **watched,
    )


def median(config: SweepConfig, watched: dict[str, Any]) -> TrialScheduler:
    """Return the median stopping rule, after the grace epochs: a trial stays while it is better than the others'."""
    return _Median(grace_period=config.scheduler.grace_epochs, min_samples_required=2, **watched)


class _Median(MedianStoppingRule):
    """The median rule of Ray Tune, which fails in every other trial when one ends before its first epoch."""

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """Stop a trial or let it continue. Tune's rule may also pause the leading one, which would train again."""
        decision: str = super().on_trial_result(tune_controller, trial, result)
        return TrialScheduler.CONTINUE if decision == TrialScheduler.PAUSE else decision

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        if self.metric in result:
            super().on_trial_complete(tune_controller, trial, result)
