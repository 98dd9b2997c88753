"""`scheduler=asha`: one trial in `scheduler.reduction_factor` stays at each rung."""

from __future__ import annotations

from typing import Any

from ray.tune.schedulers import AsyncHyperBandScheduler, TrialScheduler

from fsdp_lab.config import SweepConfig


def build_scheduler(config: SweepConfig, watched: dict[str, Any]) -> TrialScheduler:
    settings = config.scheduler
    return AsyncHyperBandScheduler(
        max_t=max(config.training.epochs, settings.grace_epochs) + 1,
        grace_period=settings.grace_epochs,
        reduction_factor=settings.reduction_factor,
        **watched,
    )
