"""What the nights of a study add to its sweep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional  # OmegaConf reads this on every Python that this project supports
from urllib.parse import urlsplit

from fsdp_lab.config.errors import ConfigError
from fsdp_lab.config.key import EVERYWHERE, Secret, at_least_one, group, key, not_negative, positive
from fsdp_lab.config.sweep import SweepConfig


@dataclass
class ToleranceConfig:
    """What a night may lose against the baseline before it is a regression: ratios to the baseline's value, and for
    `forecast_error` and `speed_forecast_error` the difference of two errors."""

    peak_memory: float = key(0.01, not_negative)
    samples_per_s: float = key(0.15, not_negative)
    loss: float = key(0.02, not_negative)
    forecast_error: float = key(0.01, not_negative)
    speed_forecast_error: float = key(0.15, not_negative)


@dataclass
class NotifyConfig:
    """`url` gets each night's verdict as JSON."""

    url: Optional[str] = key(None, secret=Secret.VALUE)
    timeout_s: float = key(10.0, positive)

    def check(self) -> None:
        """
        Raises:
            ConfigError: `url` is no http address. The address itself may be a secret and is not shown.
        """
        try:
            parts = urlsplit(self.url or "http://none")
            fine = parts.scheme in ("http", "https") and bool(parts.hostname)
        except ValueError:
            fine = False
        if not fine:
            raise ConfigError("nightly.notify.url is not an http or https address; give one, or null for none.")


def _is_significance(value: float) -> str | None:
    return None if 0 < value < 0.5 else "is outside (0, 0.5); use for example 0.005"


@dataclass
class NightConfig:
    """For `fsdp_lab.nightly`. `cron`: minute hour day month weekday, in `timezone`; null: this machine's.

    `jitter_s`: start up to so many seconds late, at random. `late_s`: how late a missed night may still start; null:
    until the next. `repeats`: trials of each setting. `significance`: the probability with which noise may look like a
    regression of one setting and metric. `others_cpu`: on a CPU no speed is judged in a night in which others had
    more than this share of all cores. `baseline`: a night of the folder; null: the last good one. `keep`: nights
    whose checkpoints and models stay; metrics always do.
    """

    cron: str = key("0 2 * * *")
    timezone: Optional[str] = key(None)
    jitter_s: float = key(0.0, not_negative)
    late_s: Optional[float] = key(None, not_negative, example=600)
    repeats: int = key(3, at_least_one)
    significance: float = key(0.005, _is_significance)
    tolerance: ToleranceConfig = group(ToleranceConfig)
    others_cpu: float = key(0.25, not_negative)
    baseline: Optional[str] = key(None)
    folder: str = key("outputs/nightly")
    keep: int = key(3, at_least_one)
    notify: NotifyConfig = group(NotifyConfig)


@dataclass
class NightlyConfig(SweepConfig):
    """A sweep, and the nights in which it runs: every key that can be typed."""

    nightly: NightConfig = group(NightConfig, may_differ=EVERYWHERE, is_param=False)

    def check(self, num_workers: int) -> None:
        """As for a sweep.

        Raises:
            ConfigError: the verdict has no address to go to.
        """
        super().check(num_workers)
        self.nightly.notify.check()
