"""What training costs, by `forecast.tokens` and `forecast.usd_per_gpu_hour`. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_lab.config.sweep import ForecastConfig
from fsdp_lab.forecast.capacity import Forecast


@dataclass(frozen=True)
class Cost:
    """What a million tokens cost, or samples where tokens are not counted, with the range of the predicted step.

    Attributes:
        unit: `tokens` or `samples`.
        hours: of all devices together, each counted: predicted, lowest and highest.
        hourly: the dollars of an hour of one device; None: not known.
        tokens: `forecast.tokens`, if tokens are counted.
        num_workers: the devices.
    """

    unit: str
    hours: tuple[float, float, float]
    hourly: float | None
    tokens: float | None
    num_workers: int

    @property
    def usd(self) -> tuple[float, ...]:
        """The dollars: predicted, lowest and highest; empty without a price."""
        return () if self.hourly is None else tuple(hours * self.hourly for hours in self.hours)


def cost_of(forecast: Forecast, asked: ForecastConfig) -> Cost | None:
    """Return what the forecast step costs; None: its speed is not known, or neither price nor tokens are."""
    speed, hourly = forecast.speed, asked.usd_per_gpu_hour
    if speed is None or (hourly is None and asked.tokens is None):
        return None
    unit, each = ("tokens", speed.tokens) if speed.tokens else ("samples", 1)
    mid, low, high = (
        hours_per_million(forecast.num_workers, speed.samples * each / seconds)
        for seconds in (speed.step_s, speed.low_s, speed.high_s)
    )
    return Cost(unit, (mid, low, high), hourly, asked.tokens if speed.tokens else None, forecast.num_workers)


def hours_per_million(num_workers: int, per_s: float) -> float:
    """Return the device hours of a million units, if all workers together do `per_s` units per second."""
    return num_workers / 3600 / per_s * 1e6
