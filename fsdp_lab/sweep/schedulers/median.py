"""`scheduler=median`: a trial stays while it is better than the median of the others."""

from __future__ import annotations

from typing import Any

from ray.tune.schedulers import MedianStoppingRule, TrialScheduler

from fsdp_lab.config import SweepConfig


class Median(MedianStoppingRule):
    """The median rule of Ray Tune, which fails in every other trial when one ends before its first epoch."""

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """Stop a trial or let it continue. Tune's rule may also pause the leading one, which would train again."""
        decision: str = super().on_trial_result(tune_controller, trial, result)
        return TrialScheduler.CONTINUE if decision == TrialScheduler.PAUSE else decision

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        if self.metric in result:
            super().on_trial_complete(tune_controller, trial, result)


def build_scheduler(config: SweepConfig, watched: dict[str, Any]) -> TrialScheduler:
    """Return the median stopping rule, after the grace epochs."""
    return Median(grace_period=config.scheduler.grace_epochs, min_samples_required=2, **watched)
