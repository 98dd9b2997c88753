"""`scheduler=median`: a trial stays while it is better than the median of the others."""

from __future__ import annotations

from typing import Any

from ray.tune.schedulers import MedianStoppingRule, TrialScheduler

from fsdp_lab.config import SweepConfig


def build_scheduler(config: SweepConfig, watched: dict[str, Any]) -> TrialScheduler:
    """Return the median stopping rule, after the grace epochs."""
    return MedianStoppingRule(grace_period=config.scheduler.grace_epochs, min_samples_required=2, **watched)
