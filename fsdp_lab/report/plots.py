"""The report's figures except the main one, as Plotly figures. They are folded on the page."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

from fsdp_lab.metrics import FORECAST, MEMORY, MIB, SPEED, TRAIN_LOSS, VAL_LOSS, declared
from fsdp_lab.report.answer import Answer
from fsdp_lab.report.data import SweepData, TrialRow, as_number
from fsdp_lab.report.effects import effects
from fsdp_lab.report.main_plot import STOPPED, main_plot
from fsdp_lab.report.style import COLORS, GREY, MOST_COLORS, coloring, four_digits, is_numeric, lay_out, trial_text
from fsdp_lab.report.thin import MOST_BARS, MOST_LINES, shown_trials
from fsdp_lab.status import TrialStatus

_CATEGORY_COLORS = {
    "param": "#0072B2", "optimizer": "#D55E00", "buffer": "#000000", "input": "#8C6D31", "grad": "#009E73",
    "unsharded_param": "#56B4E9", "all_gather": "#3B4CC0", "activation": "#E69F00", "unsharded_grad": "#7FC97F",
    "reduce_scatter": "#CC79A7", "temp": "#BBBBBB", "other": "#555555",
}  # fmt: skip


def figures(sweep: SweepData, answer: Answer) -> list[tuple[str, str, Any]]:
    """Return `(id, heading, figure)` of every chart with content, the main one first."""
    main = main_plot(sweep, answer)
    charts = [
        *([("main", main.heading, main.figure())] if main else []),
        ("forecast", "Forecast against measured", forecast(sweep, shown_trials(sweep, answer))),
        ("effects", "Effect of each axis", axis_effects(sweep)),
        ("parallel", "All axes at once", parallel(sweep, shown_trials(sweep, answer, MOST_LINES))),
        ("losses", "Loss by epoch", losses(sweep, shown_trials(sweep, answer, MOST_LINES))),
        ("breakdown", "Peak memory by category", breakdown(sweep, shown_trials(sweep, answer, MOST_BARS))),
    ]
    return [(name, heading, figure) for name, heading, figure in charts if figure is not None]


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


def losses(sweep: SweepData, trials: Sequence[TrialRow]) -> Any | None:
    """Return a line for each trial that reported, even if it did not finish; a menu switches between the losses."""
    import plotly.graph_objects as go

    kinds = [k for k in (VAL_LOSS, TRAIN_LOSS) if any(k in m for t in trials for m in t.epochs)]
    if not kinds:
        return None
    figure = go.Figure()
    colors = coloring(sweep, [{s.name: s.median(sweep.loss_key) for s in sweep.settings}], scale=False)
    reported = [t for t in trials if t.epochs]
    for kind in kinds:
        named: set[str] = set()
        for trial in reported:
            stopped = trial.status is TrialStatus.stopped
            name = STOPPED if stopped else colors.name(trial.setting.get(colors.axis or "", ""))
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


def parallel(sweep: SweepData, trials: Sequence[TrialRow]) -> Any | None:
    """Return a line for each finished trial through all axes and figures, scaled to their ranges; None for one axis."""
    import plotly.graph_objects as go

    keys = (MEMORY, SPEED, sweep.loss_key)
    shown = [t for t in _finished(trials) if _has(t, *keys)]
    if len(shown) < 2 or len(sweep.setting_axes) < 2:
        return None
    columns = [(axis, [t.setting.get(axis, "") for t in shown]) for axis in sweep.setting_axes]
    scaled = [_scaled_axis(texts, axis in sweep.log_axes) for axis, texts in columns]
    metrics = [declared(key) for key in keys]
    scaled += [_scaled_numbers([t.figures[metric.key] / metric.scale for t in shown]) for metric in metrics]
    names = [axis for axis, _ in columns] + [metric.label for metric in metrics]
    colors = coloring(sweep, [{s.name: s.median(key) for s in sweep.settings} for key in keys], scale=False)
    figure = go.Figure()
    named: set[str] = set()
    for i, trial in enumerate(shown):
        name = colors.name(trial.setting.get(colors.axis or "", ""))
        figure.add_scatter(
            x=list(range(len(names))),
            y=[positions[i] for positions, _ in scaled],
            mode="lines+markers",
            opacity=0.7 if len(shown) <= 40 else 0.35,
            line={"color": colors.of(trial.setting), "width": 1.5},
            marker={"size": 4},
            name=name,
            legendgroup=name,
            showlegend=name not in named and colors.axis is not None,
            customdata=[[sweep.url(trial)]] * len(names),
            hovertemplate=trial_text(trial, sweep.loss_key) + "<extra></extra>",
        )
        named.add(name)
    _draw_scales(figure, names, [ticks for _, ticks in scaled])
    return figure


def _draw_scales(figure: Any, names: Sequence[str], scales: Sequence[Sequence[tuple[float, str]]]) -> None:
    """Draw a vertical line for each column, with texts at its ticks."""
    for x, ticks in enumerate(scales):
        figure.add_vline(x=x, line={"color": GREY, "width": 1}, opacity=0.5, layer="below")
        for y, text in ticks:
            figure.add_annotation(
                x=x, y=y, text=html.escape(text), showarrow=False, xanchor="left", xshift=6, font={"size": 11}
            )
    lay_out(figure, "", "", 480)
    figure.update_xaxes(
        tickvals=list(range(len(names))),
        ticktext=[html.escape(name) for name in names],
        range=[-0.1, len(names) - 0.55],
        showgrid=False,
    )
    figure.update_yaxes(visible=False, range=[-0.06, 1.06])


def axis_effects(sweep: SweepData) -> Any | None:
    """Return a column for each axis and a row for each metric; None for a single axis.

    Each cell shows the mean of each value over the other axes, with the standard deviation.
    """
    from plotly.subplots import make_subplots

    axes = [axis for axis in sweep.setting_axes if len({s.values[axis] for s in sweep.settings}) > 1]
    wanted = dict.fromkeys([SPEED, MEMORY, sweep.loss_key, *(metric for metric, _ in sweep.objectives)])
    metrics = [m for m in wanted if any(math.isfinite(s.median(m)) for s in sweep.settings)]
    if len(axes) < 2 or not metrics:
        return None
    figure = make_subplots(
        len(metrics), len(axes), column_titles=[html.escape(a) for a in axes], shared_yaxes=True,
        vertical_spacing=0.06, horizontal_spacing=0.02,
    )  # fmt: skip
    for row, metric in enumerate(metrics, 1):
        for column, axis in enumerate(axes, 1):
            _draw_effect(figure, sweep, axis, metric, row, column)
            figure.update_xaxes(showticklabels=row == len(metrics), row=row, col=column)
        figure.update_yaxes(title_text=html.escape(declared(metric).label), row=row, col=1)
    lay_out(figure, None, None, 120 + 210 * len(metrics))
    return figure


def _draw_effect(figure: Any, sweep: SweepData, axis: str, metric: str, row: int, column: int) -> None:
    scale = declared(metric).scale
    points = effects(sweep, axis, metric)
    numeric = is_numeric(sweep, axis)
    many = len(points) > 2 * MOST_COLORS
    bars = {"array": [e.spread / scale for e in points], "thickness": 1.5, "width": 6}
    figure.add_scatter(
        x=[as_number(e.value) if numeric else html.escape(e.value) for e in points],
        y=[e.mean / scale for e in points],
        error_y=None if many else bars,
        mode="markers",
        marker={"size": 6 if many else 11, "color": COLORS[(row - 1) % MOST_COLORS]},
        text=[f"{html.escape(f'{axis}={e.value}')}<br>{four_digits(e.mean / scale):,.9g} ± {e.spread / scale:.2g}, of "
              f"{e.count} setting{'s' if e.count != 1 else ''}" for e in points],
        hovertemplate="%{text}<extra></extra>",
        showlegend=False,
        row=row, col=column,
    )  # fmt: skip
    if not numeric:  # the room at the sides keeps points off the frame
        figure.update_xaxes(type="category", range=[-0.5, len(points) - 0.5], row=row, col=column)
    elif axis in sweep.log_axes and all((as_number(e.value) or 0.0) > 0 for e in points):
        figure.update_xaxes(type="log", row=row, col=column)


def forecast(sweep: SweepData, trials: Sequence[TrialRow]) -> Any | None:
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
        text=[trial_text(t, sweep.loss_key) for t in shown],
        customdata=[[sweep.url(t)] for t in shown],
        hovertemplate="%{text}<extra></extra>",
    )
    lay_out(figure, "measured peak, MiB", "forecast peak, MiB", 420)
    return figure


def with_forecast(trials: Sequence[TrialRow]) -> list[TrialRow]:
    """Return the finished trials whose peak was forecast and measured."""
    return [t for t in _finished(trials) if _has(t, FORECAST, MEMORY) and t.figures[MEMORY] > 0]


def _scaled_axis(texts: Sequence[str], log: bool) -> tuple[list[float], list[tuple[float, str]]]:
    numbers = [number for text in texts if (number := as_number(text)) is not None]
    if len(numbers) == len(texts) and len(set(texts)) > 2:
        if not log or min(numbers) <= 0:
            return _scaled_numbers(numbers)
        logs, ticks = _scaled_numbers([math.log10(number) for number in numbers])
        return logs, [(place, f"{10 ** float(text):.2g}") for place, text in ticks]
    values = list(dict.fromkeys(texts))
    step = 1 / max(len(values) - 1, 1)
    places = {value: i * step for i, value in enumerate(values)}
    shown = {
        value: place
        for i, (value, place) in enumerate(places.items())
        if len(values) <= 12 or i in (0, len(values) - 1)
    }
    return [places[text] for text in texts], [(place, value) for value, place in shown.items()]


def _scaled_numbers(values: Sequence[float]) -> tuple[list[float], list[tuple[float, str]]]:
    low, high = min(values), max(values)
    if high == low:
        return [0.5] * len(values), [(0.5, f"{low:.4g}")]
    ticks = [(part, f"{low + part * (high - low):.4g}") for part in (0, 0.5, 1)]
    return [(value - low) / (high - low) for value in values], ticks


def _finished(trials: Sequence[TrialRow]) -> list[TrialRow]:
    return [trial for trial in trials if trial.status == TrialStatus.finished]


def _has(trial: TrialRow, *keys: str) -> bool:
    return all(math.isfinite(trial.figures.get(key, math.nan)) for key in keys)


def _label(trial: TrialRow) -> str:
    values = " ".join(trial.setting.values())
    return html.escape(f"{trial.number}  {values if len(values) <= 60 else values[:59] + '…'}")
