"""The configuration of a study's nights, in addition to its sweep."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional  # OmegaConf reads this on every Python that this project supports

from fsdp_lab.config.key import at_least_one, key, not_negative
from fsdp_lab.config.sweep import SweepConfig


@dataclass
class ToleranceConfig:
    """How much worse a night may be than the last good one, and than the best since the last accepted one."""

    peak_memory: float = key(0.01, not_negative)
    """Tolerance of peak memory, as a ratio to the earlier night's."""
    samples_per_s: float = key(0.15, not_negative)
    """Tolerance of samples/s, as a ratio to the earlier night's."""
    loss: float = key(0.02, not_negative)
    """Tolerance of the final loss, as a ratio to the earlier night's."""
    data_wait_share: float = key(0.05, not_negative)
    """By how much the share of the step time that waits for data may grow."""
    forecast_error: float = key(0.01, not_negative)
    """By how much the error of memory forecasts may grow."""
    speed_forecast_error: float = key(0.15, not_negative)
    """By how much the error of speed forecasts may grow."""


def _is_significance(value: float) -> str | None:
    """Take a number between 0 and 0.5."""
    return None if 0 < value < 0.5 else "is outside (0, 0.5); use for example 0.005"


@dataclass
class NightConfig:
    """The nights of a study, for `fsdp_lab.nightly`."""

    cron: str = key("0 2 * * *")
    """When nights start: minute hour day month weekday."""
    timezone: Optional[str] = key(None)
    """Time zone of `cron`; null: this machine's."""
    repeats: int = key(3, at_least_one)
    """Runs of each setting."""
    significance: float = key(0.005, _is_significance)
    """Probability with which noise may look like a regression of one setting and metric."""
    tolerance: ToleranceConfig = field(default_factory=ToleranceConfig)
    folder: str = key("outputs/nightly")
    """Folder of all nights."""
    keep: int = key(3, at_least_one)
    """Number of nights whose checkpoints and models are kept; metrics are always kept."""


@dataclass
class NightlyConfig(SweepConfig):
    """A sweep, and the nights in which it runs: every key that can be typed."""

    nightly: NightConfig = field(default_factory=NightConfig)
