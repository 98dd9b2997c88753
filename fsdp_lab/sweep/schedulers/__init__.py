"""The schedulers of `scheduler=...`, one file each: which trials Ray Tune stops early."""

from __future__ import annotations

import importlib
from typing import Any

from fsdp_lab.config import SweepConfig, stops_on
from fsdp_lab.config.registry import module_of


def build_scheduler(config: SweepConfig) -> Any:
    """Return Ray Tune's scheduler for `scheduler=...`, which counts the epochs that a trial has trained."""
    metric, mode = stops_on(config)
    module = importlib.import_module(module_of("scheduler.name", config.scheduler.name))
    return module.build_scheduler(config, {"time_attr": "epoch", "metric": metric, "mode": mode})
