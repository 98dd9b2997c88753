"""Forecasts made by hand: of 8 GPUs with 1,000 bytes, 100 samples a step, whose seconds are known to a tenth."""

from __future__ import annotations

from dataclasses import replace

from fsdp_lab.forecast.capacity import Forecast
from fsdp_lab.forecast.speed.device import Basis
from fsdp_lab.forecast.speed.predict import BOUNDS, Speed
from fsdp_lab.forecast.table import Row

CONTEXT = 100  # bytes, of what is tight or fits
PEAK = 700
NEEDS = {"yes": 900, "tight": 1001, "no": 1001}
ACTIVE = {"yes": 750, "tight": 900, "no": 901}


def speed_of(step_s: float, error: float = 0.1, **changed: object) -> Speed:
    """Return a step that nothing bounds in particular, in the group of one model.

    Args:
        step_s: its seconds.
        error: of the prediction, as a share, either way.
        changed: other fields.
    """
    speed = Speed(
        step_s, dict.fromkeys(BOUNDS, 0.2), step_s / (1 + error), step_s / (1 - error), error, Basis.fitted, "X",
        samples=100, group="one model",
    )  # fmt: skip
    return replace(speed, **changed)  # type: ignore[arg-type]


def row(setting: str, step_s: float, peak: int = 100, fits: bool = True, **changed: object) -> Row:
    """Return a setting that needs `peak` bytes, of 1,000 or, if it does not fit, of 50."""
    peaks, speed = {"device": {"total": peak}}, speed_of(step_s, **changed)  # type: ignore[arg-type]
    return Row([setting], Forecast(True, 8, peaks, capacity_bytes=1000 if fits else 50, data_sheet="X", speed=speed))


def forecast_of(verdict: str, step_s: float = 1.0, capacity: int | None = 1000) -> Forecast:
    """Return one whose allocator caches: it fits ("yes"), fits without what is cached ("tight"), or does not ("no")."""
    reserved = NEEDS[verdict] - CONTEXT
    allowances = {"CUDA context": CONTEXT, "fragmentation": reserved - PEAK}
    return Forecast(
        True, 8, {"device": {"total": PEAK}}, allowances, {}, capacity, None, ACTIVE[verdict], reserved_bytes=reserved,
        speed=speed_of(step_s),
    )  # fmt: skip
