"""Sentences about forecasts, from `report/templates/forecast_words.j2`. Imports no torch."""

from __future__ import annotations

from typing import Any

from fsdp_lab.forecast.capacity import NoForecast


def say(macro: str, *values: Any) -> list[str]:
    """Return the lines of a sentence, or of several."""
    from fsdp_lab.report.render import lines_of  # imports Hydra, which a forecast process does not need

    return lines_of("forecast_words.j2", macro, *values)


def no_forecast_text(error: NoForecast | None) -> str | None:
    """Return why there is no forecast, in one line; None: there is one."""
    return " ".join(say("no_forecast", error)) if error else None
