"""The sentences of forecasts, from their template. Imports no torch."""

from __future__ import annotations

from typing import Any

from fsdp_lab.forecast.capacity import NoForecast

# Steps unlike those of the fits -> how many published ones on A100s and H100s were compared, and within how many %
# all were predicted. A test counts them in experiments/published/results/rows.csv.
COMPARED = {
    "compile=true": (8, 15),
    "float8": (2, 8),
    "several nodes": (16, 16),
    "hybrid sharding over several nodes": (2, 5),
}


def words_of_forecasts() -> Any:
    from fsdp_lab.report.render import environment  # which imports Hydra: a step is followed without it

    return environment(False).get_template("forecast_words.j2", globals={"compared": COMPARED}).module


def no_forecast_text(error: NoForecast | None) -> str | None:
    """Return why there is no forecast, in a line; None: there is one."""
    return None if error is None else str(words_of_forecasts().no_forecast(error))
