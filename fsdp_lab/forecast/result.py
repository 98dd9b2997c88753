"""Forecasts with their answer and their chart, for the command and the Python API. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_lab.forecast.answer import ForecastAnswer
from fsdp_lab.forecast.capacity import GIB
from fsdp_lab.forecast.table import COLUMNS, Row, forecasts_frame
from fsdp_lab.forecast.words import no_forecast_text
from fsdp_lab.record.trial import words

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class ForecastResult:
    """The forecasts of a command line.

    Attributes:
        axes: the keys that differ between the settings.
        rows: a forecast a setting, the best first; of an interrupted command those that were made.
        shown: the same without settings that differ only in a key that has no effect on them.
        answers: one for each device, number of workers and global batch size; none if no forecast could be made.
        folder: has `forecast.csv`, and a page for each forecast.
        missing: how many settings have no forecast because of an interrupt.
    """

    axes: Sequence[str]
    rows: Sequence[Row]
    shown: Sequence[Row]
    answers: Sequence[ForecastAnswer]
    folder: Path
    missing: int

    def frame(self) -> pd.DataFrame:
        """Return the rows with the columns of `forecast.csv`: the axes as typed, then bytes, seconds and samples/s."""
        return forecasts_frame(self.rows, self.axes)

    @property
    def recommendation(self) -> ForecastAnswer:
        """The first of the answers. Its sentence names its device, number of workers and batch size if they differ."""
        return self.answers[0]

    @property
    def reasons(self) -> list[str]:
        """Why settings have no forecast, or no speed; each reason once."""
        every = [why for row in self.rows for why in (no_forecast_text(row.forecast.error), row.forecast.no_speed)]
        return sorted({why for why in every if why})

    def plot(self) -> Any:
        """Return a Plotly figure: predicted speeds against needed memory; without speeds, the parts of each peak."""
        import plotly.express as px

        made = [row for row in self.shown if not row.forecast.error]
        frame = forecasts_frame(made, self.axes)
        names = [words(dict(zip(self.axes, row.settings, strict=True))) for row in made]
        if frame["step_s"].isna().all():
            parts = {name: frame[[f"{part}_bytes" for part in of]].sum(axis=1) / GIB for name, of in COLUMNS.items()}
            figure = px.bar(frame[[]].assign(**parts), x=[*parts], y=names, orientation="h")
            figure.update_yaxes(autorange="reversed")
            return figure.update_layout(xaxis_title="GiB at the peak", yaxis_title=None, legend_title=None)
        unit = "tokens" if frame["tokens_per_s_per_device"].notna().any() else "samples"
        x, y = "GiB needed on a device", f"predicted {unit}/s per device"
        rate = frame[f"{unit}_per_s_per_device"]
        figures = {x: frame["needed_bytes"].astype(float) / GIB, y: rate, "setting": names}
        figures["faster"] = rate * (frame["step_s"] / frame["step_low_s"] - 1)
        figures["slower"] = rate * (1 - frame["step_s"] / frame["step_high_s"])
        return px.scatter(
            frame.assign(**figures), x=x, y=y, error_y="faster", error_y_minus="slower", hover_name="setting",
            color=self.axes[0] if self.axes else None, symbol="fits" if frame["fits"].notna().any() else None,
        )  # fmt: skip
