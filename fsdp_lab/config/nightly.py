"""The configuration of a study's nights, in addition to its sweep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional  # OmegaConf reads this on every Python that this project supports
from urllib.parse import urlsplit

from fsdp_lab.config.errors import ConfigError
from fsdp_lab.config.key import EVERYWHERE, Secret, at_least_one, group, key, not_negative, positive
from fsdp_lab.config.sweep import SweepConfig


@dataclass
class ToleranceConfig:
    """How much worse than the baseline a night may be before it is a regression."""

    peak_memory: float = key(0.01, not_negative)
    """Tolerance of peak memory, as a ratio to the baseline's."""
    samples_per_s: float = key(0.15, not_negative)
    """Tolerance of samples/s, as a ratio to the baseline's."""
    loss: float = key(0.02, not_negative)
    """Tolerance of the final loss, as a ratio to the baseline's."""
    forecast_error: float = key(0.01, not_negative)
    """By how much the error of memory forecasts may grow."""
    speed_forecast_error: float = key(0.15, not_negative)
    """By how much the error of speed forecasts may grow."""


@dataclass
class NotifyConfig:
    """Where the verdict of a night is sent."""

    url: Optional[str] = key(None, secret=Secret.VALUE)
    """HTTP address that gets each verdict as JSON; null: none."""
    timeout_s: float = key(10.0, positive)
    """Seconds to wait for the answer of `url`."""

    def check(self) -> None:
        """Check that `url` is an http or https address.

        Raises:
            ConfigError: it is not. The message does not show the address, which may be a secret.
        """
        try:
            parts = urlsplit(self.url or "http://none")
            fine = parts.scheme in ("http", "https") and bool(parts.hostname)
        except ValueError:
            fine = False
        if not fine:
            raise ConfigError("nightly.notify.url is not an http or https address; give one, or null for none.")


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
    jitter_s: float = key(0.0, not_negative)
    """Start up to this many seconds late, at random."""
    late_s: Optional[float] = key(None, not_negative, example=600)
    """Seconds by which a missed night may still start; null: until the next one."""
    repeats: int = key(3, at_least_one)
    """Runs of each setting; the most with `repeat=auto`."""
    significance: float = key(0.005, _is_significance)
    """Probability with which noise may look like a regression of one setting and metric."""
    tolerance: ToleranceConfig = group(ToleranceConfig)
    others_cpu: float = key(0.25, not_negative)
    """On a CPU, judge no speed in a night in which other processes used more than this share of all cores."""
    baseline: Optional[str] = key(None)
    """Night to compare with; null: the last good one."""
    folder: str = key("outputs/nightly")
    """Folder of all nights."""
    keep: int = key(3, at_least_one)
    """Number of nights whose checkpoints and models are kept; metrics are always kept."""
    notify: NotifyConfig = group(NotifyConfig)


@dataclass
class NightlyConfig(SweepConfig):
    """A sweep, and the nights in which it runs: every key that can be typed."""

    nightly: NightConfig = group(NightConfig, may_differ=EVERYWHERE, is_param=False)

    def check(self, num_workers: int) -> None:
        """Check the sweep as `SweepConfig.check` does, and the address of the verdict.

        Raises:
            ConfigError: see `SweepConfig.check` and `NotifyConfig.check`.
        """
        super().check(num_workers)
        self.nightly.notify.check()
