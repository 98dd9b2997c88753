"""The report's figures except the main one, as Plotly figures. They are folded on the page."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from fsdp_lab.metrics import FORECAST, MEMORY, MIB, TRAIN_LOSS, VAL_LOSS, declared
from fsdp_lab.report.answer import Answer
from fsdp_lab.report.data import SweepData, TrialRow
from fsdp_lab.report.main_plot import STOPPED, main_plot
from fsdp_lab.report.style import (
    COLORS,
    GREY,
    coloring,
    lay_out,
    trial_text,
)
from fsdp_lab.report.tables import MOST, MOST_BARS, MOST_LINES, shown_trials, thinned_notes
from fsdp_lab.status import TrialStatus

_BREAKDOWN = "Memory by category at the peak of the largest worker."
_CATEGORY_COLORS = {
    "param": "#0072B2", "optimizer": "#D55E00", "buffer": "#000000", "input": "#8C6D31", "grad": "#009E73",
    "unsharded_param": "#56B4E9", "all_gather": "#3B4CC0", "activation": "#E69F00", "unsharded_grad": "#7FC97F",
    "reduce_scatter": "#CC79A7", "temp": "#BBBBBB", "other": "#555555",
}  # fmt: skip


class Chart(NamedTuple):
    """A figure of the page: its id, its heading, the figure and how to read it."""

    name: str
    heading: str
    figure: Any
    note: str = ""


def figures(sweep: SweepData, answer: Answer) -> list[Chart]:
    """Return every chart with content, the main one first."""
    main, r = main_plot(sweep, answer), answer.recommendation
    points, lines, bars = (shown_trials(sweep, r, most) for most in (MOST, MOST_LINES, MOST_BARS))
    charts = [
        *([Chart("main", main.heading, main.figure(), main.note)] if main else []),
        Chart("forecast", "Forecast against measured", forecast(sweep, answer, points), _cut(sweep, MOST)),
        Chart("losses", "Loss by epoch", losses(sweep, answer, lines), _cut(sweep, MOST_LINES)),
        Chart("breakdown", "Peak memory by category", breakdown(sweep, bars), f"{_BREAKDOWN} {_cut(sweep, MOST_BARS)}"),
    ]
    return [chart for chart in charts if chart.figure is not None]


def _cut(sweep: SweepData, most: int) -> str:
    return " ".join(thinned_notes(sweep, most)[:1])


def breakdown(sweep: SweepData, trials: Sequence[TrialRow]) -> Any | None:
    """Return a bar for each finished trial, the smallest on top: the peak of its largest worker by category."""
    import plotly.graph_objects as go

    shown = sorted(
        (t for t in _finished(trials) if any(f"memory/{c}_bytes" in t.figures for c in _CATEGORY_COLORS)),
        key=lambda t: t.figures.get(MEMORY, math.inf),
        reverse=True,  # Plotly draws from the bottom
    )
    if not shown:
        return None
    figure = go.Figure()
    labels = [_label(t) for t in shown]
    for category, color in _CATEGORY_COLORS.items():
        sizes = [t.figures.get(f"memory/{category}_bytes", 0.0) / MIB for t in shown]
        if any(sizes):
            figure.add_bar(
                x=sizes,
                y=labels,
                orientation="h",
                name=category.replace("_", " "),
                marker={"color": color, "line": {"width": 0}},
                customdata=[[sweep.url(t)] for t in shown],
                hovertemplate="%{y}<br>" + category.replace("_", " ") + " %{x:,.4~r} MiB<extra></extra>",
            )
    per_bar = 26 if len(shown) <= 40 else 15
    lay_out(figure, "MiB at the peak of the largest worker", "", 160 + per_bar * len(shown))
    figure.update_layout(barmode="stack", bargap=0.15)
    figure.update_yaxes(automargin=True, tickfont={"size": 12 if per_bar > 20 else 10}, dtick=1)
    return figure


def losses(sweep: SweepData, answer: Answer, trials: Sequence[TrialRow]) -> Any | None:
    """Return a line for each trial that reported, even if it did not finish; a menu switches between the losses."""
    import plotly.graph_objects as go

    kinds = [k for k in (VAL_LOSS, TRAIN_LOSS) if any(k in m for t in trials for m in t.epochs)]
    if not kinds:
        return None
    figure = go.Figure()
    colors = coloring(answer, [answer.recommendation.settings.loss_key], scale=False)
    reported = [t for t in trials if t.epochs]
    for kind in kinds:
        named: set[str] = set()
        for trial in reported:
            stopped = trial.status is TrialStatus.stopped
            name = STOPPED if stopped else colors.name(trial.setting)
            # a value that is not finite is a gap: the line ends there
            figure.add_scatter(
                x=[m["epoch"] for m in trial.epochs if kind in m],
                y=[m[kind] if math.isfinite(m[kind]) else None for m in trial.epochs if kind in m],
                mode="lines+markers",
                opacity=0.85 if len(reported) <= 20 else 0.45,
                line={"color": GREY if stopped else colors.of(trial.setting)},
                marker={"size": 5, "symbol": "circle-open" if stopped else "circle"},
                name=name,
                legendgroup=name,
                showlegend=name not in named and (stopped or colors.axis is not None),
                visible=kind == kinds[0],
                customdata=[[sweep.url(trial)]] * len(trial.epochs),
                hovertemplate=html.escape(trial.name) + "<br>epoch %{x}: %{y:.4~r}<extra></extra>",
            )
            named.add(name)
    lay_out(figure, "epoch", declared(kinds[0]).label, 480)
    most = max(m["epoch"] for t in reported for m in t.epochs)
    figure.update_xaxes(tickformat="d", dtick=max(1, round(most / 12)))
    figure.update_layout(updatemenus=_loss_menus(kinds, len(reported)), margin={"t": 80})
    return figure


def _loss_menus(kinds: Sequence[str], lines: int) -> list[dict[str, Any]]:
    """Return menus for the loss, of `lines` lines each, and for the scale."""
    buttons = []
    for place, kind in enumerate(kinds):
        visible = [i // lines == place for i in range(len(kinds) * lines)]
        change = [{"visible": visible}, {"yaxis.title.text": declared(kind).label}]
        buttons.append({"label": declared(kind).label, "method": "update", "args": change})
    scales = [{"label": s, "method": "relayout", "args": [{"yaxis.type": s}]} for s in ("linear", "log")]
    return [{"buttons": b, "x": x, "y": 1.16, "xanchor": "left"} for b, x in ((buttons, 0), (scales, 0.16))]


def forecast(sweep: SweepData, answer: Answer, trials: Sequence[TrialRow]) -> Any | None:
    """Return a point for each trial with a forecast and a measured peak, and the line of equality.

    None if all are equal.
    """
    import plotly.graph_objects as go

    shown = with_forecast(trials)
    if all(t.figures[FORECAST] == t.figures[MEMORY] for t in shown):
        return None
    figure = go.Figure()
    measured = [t.figures[MEMORY] / MIB for t in shown]
    ends = [min(measured) * 0.97, max(measured) * 1.03]
    figure.add_scatter(
        x=ends, y=ends, mode="lines", line={"dash": "dot", "color": GREY}, name="equal", hoverinfo="skip"
    )
    figure.add_scatter(
        x=measured,
        y=[t.figures[FORECAST] / MIB for t in shown],
        mode="markers",
        marker={"size": 11, "color": COLORS[0], "opacity": 0.7},
        name="trials",
        text=[trial_text(t, answer.recommendation.settings.loss_key) for t in shown],
        customdata=[[sweep.url(t)] for t in shown],
        hovertemplate="%{text}<extra></extra>",
    )
    lay_out(figure, "measured peak, MiB", "forecast peak, MiB", 420)
    return figure


def with_forecast(trials: Sequence[TrialRow]) -> list[TrialRow]:
    """Return the finished trials whose peak was forecast and measured."""
    return [t for t in _finished(trials) if _has(t, FORECAST, MEMORY) and t.figures[MEMORY] > 0]


def _finished(trials: Sequence[TrialRow]) -> list[TrialRow]:
    return [trial for trial in trials if trial.status == TrialStatus.finished]


def _has(trial: TrialRow, *keys: str) -> bool:
    return all(math.isfinite(trial.figures.get(key, math.nan)) for key in keys)


def _label(trial: TrialRow) -> str:
    values = " ".join(trial.setting.values())
    return html.escape(f"{trial.number}  {values if len(values) <= 60 else values[:59] + '…'}")
