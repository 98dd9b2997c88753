"""What training costs, by `forecast.usd_per_gpu_hour`. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_lab.config.sweep import ForecastConfig
from fsdp_lab.forecast.capacity import Forecast


@dataclass(frozen=True)
class Cost:
    """The dollars of a million tokens, or samples where tokens are not counted, and the range of the predicted step.

    Attributes:
        unit: `tokens` or `samples`.
        hourly: of one device.
        tokens: `forecast.tokens`, if tokens are counted.
    """

    unit: str
    usd: float
    low: float
    high: float
    hourly: float
    tokens: float | None


def cost_of(forecast: Forecast, asked: ForecastConfig) -> Cost | None:
    """Return what the forecast step costs; None: its speed or the price is not known."""
    speed, hourly = forecast.speed, asked.usd_per_gpu_hour
    if speed is None or hourly is None:
        return None
    unit, each = ("tokens", speed.tokens) if speed.tokens else ("samples", 1)
    usd, low, high = (
        usd_per_million(hourly, forecast.num_workers, speed.samples * each / seconds)
        for seconds in (speed.step_s, speed.low_s, speed.high_s)
    )
    return Cost(unit, usd, low, high, hourly, asked.tokens if speed.tokens else None)


def usd_per_million(hourly: float, num_workers: int, per_s: float) -> float:
    """Return the dollars of a million units, if all workers together do `per_s` units per second."""
    return hourly * num_workers / 3600 / per_s * 1e6
