"""`scheduler=fifo`: no trial is stopped early."""

from __future__ import annotations

from typing import Any

from ray.tune.schedulers import FIFOScheduler, TrialScheduler

from fsdp_lab.config import SweepConfig


def build_scheduler(config: SweepConfig, watched: dict[str, Any]) -> TrialScheduler:
    """Return a scheduler that stops no trial early."""
    return FIFOScheduler()
