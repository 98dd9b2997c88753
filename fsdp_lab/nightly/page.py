"""The last thirty nights on one page: a line for each setting and metric, and what changed."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from fsdp_lab.config.metrics import Metric, gated
from fsdp_lab.config.nightly import ToleranceConfig
from fsdp_lab.config.status import TrialStatus
from fsdp_lab.nightly.gate import STATUS
from fsdp_lab.nightly.nights import Night, Verdict, changes
from fsdp_lab.nightly.texts import regressions_line, say, template
from fsdp_lab.report.page import page
from fsdp_lab.report.plots import COLORS, GREY

if TYPE_CHECKING:
    import pandas as pd

_MOST_NIGHTS = 30


def nights_page(study: str, nights: Sequence[Night], tolerance: ToleranceConfig) -> str:
    """Return the page of the latest nights.

    Args:
        tolerance: no axis shows less than twice the change that is tolerated.
    """
    shown = nights[-_MOST_NIGHTS:]
    rows = frame_of_nights(shown)
    charts = [
        (f"metric-{place}", f"{metric.label} by night", figure)
        for place, metric in enumerate(gated())
        if (figure := chart(metric, shown, rows, getattr(tolerance, metric.gate.tolerance))) is not None
    ]
    lines = [
        (night, changes(before, night), regressions_line(night))
        for before, night in zip([*shown[:1], *shown], shown, strict=False)
    ]
    body = template("nights.html").render(nights=lines[::-1], charts=[(name, heading) for name, heading, _ in charts])
    about = say("about_nights", len(shown))
    return page(f"{study}, night by night", about, body, [(name, figure) for name, _, figure in charts])


def frame_of_nights(nights: Sequence[Night]) -> pd.DataFrame:
    """Return the finished trials of nights, a row each, with the time at which their night began."""
    import pandas as pd

    rows = [{**trial, "at": night.begun * 1000, "night": night.id} for night in nights for trial in night.trials]
    frame = pd.DataFrame(rows, columns=["at", "night", "setting", STATUS] if not rows else None)
    return frame[frame[STATUS] == TrialStatus.finished]


def chart(metric: Metric, nights: Sequence[Night], rows: pd.DataFrame, limit: float) -> Any | None:
    """None if no night has measured the metric."""
    import plotly.express as px

    rows = rows.dropna(subset=metric.key) if metric.key in rows else rows[:0]
    if rows.empty:
        return None
    rows = rows.assign(value=rows[metric.key].astype(float) / metric.scale, setting=rows["setting"].map(escape))
    points = rows.groupby(["at", "night", "setting"], sort=False)["value"].agg(["min", "median", "max"]).reset_index()
    points = points.assign(above=points["max"] - points["median"], below=points["median"] - points["min"])
    figure = px.line(
        points, x="at", y="median", error_y="above", error_y_minus="below", color="setting", markers=True,
        hover_data=["night"], color_discrete_sequence=COLORS, template="plotly_white", render_mode="svg",
    )  # fmt: skip
    bad = {(n.id, escape(f.setting)) for n in nights for f in n.regressions if f.metric == metric.key}
    accepted = {night.id for night in nights if night.verdict is Verdict.accepted}
    is_bad = points[["night", "setting"]].apply(tuple, axis=1).isin(bad)
    for symbol, marked in (("x", points[is_bad]), ("diamond", points[~is_bad & points["night"].isin(accepted)])):
        marker = {"symbol": symbol, "size": 13, "color": "#555555"}
        figure.add_scatter(x=marked["at"], y=marked["median"], mode="markers", marker=marker, showlegend=False)
    for before, night in pairwise(nights):
        if changed := changes(before, night):
            note = {"textangle": -30, "xanchor": "left", "yanchor": "bottom", "font": {"size": 10}}
            note["text"] = escape(say("changed", changed))
            figure.add_vline(night.begun * 1000, line_dash="dot", line_color=GREY, annotation=note)
    figure.update_layout(
        height=440, margin={"l": 70, "r": 20, "t": 70, "b": 90}, yaxis_title=metric.label, xaxis_title=None,
        legend={"orientation": "h", "y": -0.15, "title": None}, hoverlabel={"align": "left"}, xaxis_type="date",
    )  # fmt: skip
    low, high = rows["value"].min(), rows["value"].max()
    band = limit * (abs(low + high) / 2 if metric.gate.kind == "ratio" else 1)
    if high - low < 2 * band:  # noise shall not fill the chart
        figure.update_yaxes(range=[(low + high) / 2 - band, (low + high) / 2 + band])
    return figure
