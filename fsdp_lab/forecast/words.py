"""The sentences of forecasts, from their template. Imports no torch."""

from __future__ import annotations

from typing import Any

from fsdp_lab.forecast.capacity import NoForecast
from fsdp_lab.speed.fitted import COMPARED


def words_of_forecasts() -> Any:
    """Return the template of a forecast's sentences."""
    from fsdp_lab.report.render import environment  # which imports Hydra: a step is followed without it

    return environment(False).get_template("forecast_words.j2", globals={"compared": COMPARED}).module


def no_forecast_text(error: NoForecast | None) -> str | None:
    """Return why there is no forecast, in a line; None: there is one."""
    return None if error is None else str(words_of_forecasts().no_forecast(error))
