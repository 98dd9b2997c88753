"""The report's figures, as Plotly draws them. A hover shows the trial; a click opens its run, with a server known."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

from fsdp_lab.metrics import MEMORY, MIB, SPEED, TRAIN_LOSS, VAL_LOSS, declared, table_columns
from fsdp_lab.report.answer import Answer
from fsdp_lab.report.data import Sweep, Trial, as_number
from fsdp_lab.report.effects import effects
from fsdp_lab.status import TrialStatus

# Okabe and Ito's colours, which colour-blind readers can tell apart; on white their yellow is too faint for lines.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#8C6D31")
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star-triangle-up", "pentagon", "hexagram")
_GREY = "#888888"
_MOST_COLORS = len(COLORS)
_CATEGORY_COLORS = {
    "param": "#0072B2", "optimizer": "#D55E00", "buffer": "#000000", "input": "#8C6D31", "grad": "#009E73",
    "unsharded_param": "#56B4E9", "all_gather": "#3B4CC0", "activation": "#E69F00", "unsharded_grad": "#7FC97F",
    "reduce_scatter": "#CC79A7", "temp": "#BBBBBB", "other": "#555555",
}  # fmt: skip


def figures(sweep: Sweep, found: Answer) -> list[tuple[str, str, Any]]:
    """`(id, heading, figure)` of every chart that there is something to show in."""
    charts = [
        ("memory-speed", "Memory against throughput", memory_against_speed(sweep, found)),
        ("breakdown", "What the peak is made of", breakdown(sweep)),
        ("losses", "Loss by epoch", losses(sweep)),
        ("parallel", "All axes at once", parallel(sweep)),
        ("effects", "What each axis does alone", axis_effects(sweep)),
        ("forecast", "Forecast against measured", forecast(sweep)),
    ]
    return [(name, heading, figure) for name, heading, figure in charts if figure is not None]


def memory_against_speed(sweep: Sweep, found: Answer) -> Any | None:
    """A point a finished trial; the front and the recommended setting over the medians of repeats."""
    import plotly.graph_objects as go

    shown = [t for t in _finished(sweep) if _has(t, MEMORY, SPEED)]
    if not shown:
        return None
    figure = go.Figure()
    color_axis, symbol_axis = _axes_for_style(sweep)
    symbols = _styles(sweep, symbol_axis, _SYMBOLS)
    for value, color in _styles(sweep, color_axis, COLORS).items():
        group = [t for t in shown if t.setting.get(color_axis or "", "") == value]
        if group:
            figure.add_scatter(
                x=[t.figures[MEMORY] / MIB for t in group],
                y=[t.figures[SPEED] for t in group],
                mode="markers",
                name=f"{color_axis}={value}" if color_axis else "trials",
                marker={
                    "color": color,
                    "size": 11,
                    "opacity": 0.8,
                    "symbol": [symbols.get(t.setting.get(symbol_axis or "", ""), "circle") for t in group],
                },
                **_hover(sweep, group),
            )
    front = sorted(
        ((s.median(MEMORY) / MIB, s.median(SPEED), s.name) for s in sweep.settings if s.name in found.front),
    )
    figure.add_scatter(
        x=[x for x, _, _ in front],
        y=[y for _, y, _ in front],
        mode="lines",
        line={"shape": "hv", "dash": "dot", "color": _GREY},
        name="Pareto front",
        hoverinfo="skip",
    )
    if found.setting is not None:
        figure.add_scatter(
            x=[found.setting.median(MEMORY) / MIB],
            y=[found.setting.median(SPEED)],
            mode="markers",
            marker={"symbol": "circle-open", "size": 24, "color": "#000000", "line": {"width": 3}},
            name="recommended",
            hoverinfo="skip",
        )
    _lay_out(figure, "peak memory of a worker, MiB", "samples/s", 520)
    if symbol_axis:
        shapes = ", ".join(f"{symbol.replace('-', ' ')} {value}" for value, symbol in symbols.items())
        _note(figure, f"shapes: {symbol_axis}: {shapes}")
    return figure


def breakdown(sweep: Sweep) -> Any | None:
    """A bar a finished trial, the smallest on top: what its largest worker held when it held most."""
    import plotly.graph_objects as go

    shown = sorted(
        (t for t in _finished(sweep) if any(f"memory/{c}_bytes" in t.figures for c in _CATEGORY_COLORS)),
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
                hovertemplate="%{y}<br>" + category.replace("_", " ") + " %{x:.3f} MiB<extra></extra>",
            )
    per_bar = 26 if len(shown) <= 40 else 15
    _lay_out(figure, "MiB at the peak of the largest worker", "", 160 + per_bar * len(shown))
    figure.update_layout(barmode="stack", bargap=0.15)
    figure.update_yaxes(automargin=True, tickfont={"size": 12 if per_bar > 20 else 10}, dtick=1)
    return figure


def losses(sweep: Sweep) -> Any | None:
    """A line a trial that reported, also those that did not finish; a menu changes between the losses."""
    import plotly.graph_objects as go

    kinds = [k for k in (VAL_LOSS, TRAIN_LOSS) if any(k in m for t in sweep.trials for m in t.epochs)]
    if not kinds:
        return None
    figure = go.Figure()
    color_axis, dash_axis = _axes_for_style(sweep)
    colors = _styles(sweep, color_axis, COLORS)
    dashes = _styles(sweep, dash_axis, ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot"))
    reported = [t for t in sweep.trials if t.epochs]
    for kind in kinds:
        named: set[str] = set()
        for trial in reported:
            value = trial.setting.get(color_axis or "", "")
            # a value that is not finite is a gap: the line ends there
            figure.add_scatter(
                x=[m["epoch"] for m in trial.epochs if kind in m],
                y=[m[kind] if math.isfinite(m[kind]) else None for m in trial.epochs if kind in m],
                mode="lines+markers",
                opacity=0.85 if len(reported) <= 20 else 0.45,
                line={
                    "color": colors.get(value, _GREY),
                    "dash": dashes.get(trial.setting.get(dash_axis or "", ""), "solid"),
                },
                marker={"size": 5},
                name=f"{color_axis}={value}" if color_axis else "trials",
                legendgroup=value,
                showlegend=value not in named,
                visible=kind == kinds[0],
                customdata=[[sweep.url(trial)]] * len(trial.epochs),
                hovertemplate=html.escape(trial.name) + "<br>epoch %{x}: %{y:.4f}<extra></extra>",
            )
            named.add(value)
    _lay_out(figure, "epoch", declared(kinds[0]).label, 480)
    most = max(m["epoch"] for t in reported for m in t.epochs)
    figure.update_xaxes(tickformat="d", dtick=max(1, round(most / 12)))
    if dash_axis:
        _note(figure, f"dashes: {dash_axis}: " + ", ".join(f"{dash} {value}" for value, dash in dashes.items()))
    buttons = []
    for place, kind in enumerate(kinds):
        visible = [i // len(reported) == place for i in range(len(kinds) * len(reported))]
        change = [{"visible": visible}, {"yaxis.title.text": declared(kind).label}]
        buttons.append({"label": declared(kind).label, "method": "update", "args": change})
    scales = [{"label": s, "method": "relayout", "args": [{"yaxis.type": s}]} for s in ("linear", "log")]
    menus = [{"buttons": b, "x": x, "y": 1.16, "xanchor": "left"} for b, x in ((buttons, 0), (scales, 0.16))]
    figure.update_layout(updatemenus=menus)
    return figure


def parallel(sweep: Sweep) -> Any | None:
    """A line a finished trial through all axes and figures, each scaled to its own range."""
    import plotly.graph_objects as go

    shown = [t for t in _finished(sweep) if _has(t, MEMORY, SPEED, sweep.loss_key)]
    if len(shown) < 2 or not sweep.setting_axes:
        return None
    columns = [(axis, [t.setting.get(axis, "") for t in shown]) for axis in sweep.setting_axes]
    scaled = [_scaled_axis(texts) for _, texts in columns]
    metrics = [declared(key) for key in (MEMORY, SPEED, sweep.loss_key)]
    scaled += [_scaled_numbers([t.figures[metric.key] / metric.scale for t in shown]) for metric in metrics]
    names = [axis for axis, _ in columns] + [metric.label for metric in metrics]
    color_axis, _ = _axes_for_style(sweep)
    colors = _styles(sweep, color_axis, COLORS)
    figure = go.Figure()
    named: set[str] = set()
    for i, trial in enumerate(shown):
        value = trial.setting.get(color_axis or "", "")
        figure.add_scatter(
            x=list(range(len(names))),
            y=[positions[i] for positions, _ in scaled],
            mode="lines+markers",
            opacity=0.7 if len(shown) <= 40 else 0.35,
            line={"color": colors.get(value, _GREY), "width": 1.5},
            marker={"size": 4},
            name=f"{color_axis}={value}" if color_axis else "trials",
            legendgroup=value,
            showlegend=value not in named,
            customdata=[[sweep.url(trial)]] * len(names),
            hovertemplate=_hover_text(trial) + "<extra></extra>",
        )
        named.add(value)
    for x, (_, ticks) in enumerate(scaled):
        figure.add_vline(x=x, line={"color": "#CCCCCC", "width": 1}, layer="below")
        for y, text in ticks:
            figure.add_annotation(
                x=x, y=y, text=html.escape(text), showarrow=False, xanchor="left", xshift=6, font={"size": 11},
                bgcolor="rgba(255,255,255,0.75)",
            )  # fmt: skip
    _lay_out(figure, "", "", 480)
    figure.update_xaxes(
        tickvals=list(range(len(names))), ticktext=names, range=[-0.1, len(names) - 0.55], showgrid=False
    )
    figure.update_yaxes(visible=False, range=[-0.06, 1.06])
    return figure


def axis_effects(sweep: Sweep) -> Any | None:
    """A column an axis, a row a metric: the mean of each value over the other axes, with the standard deviation."""
    from plotly.subplots import make_subplots

    axes = [axis for axis in sweep.setting_axes if len({s.values[axis] for s in sweep.settings}) > 1]
    metrics = [m for m in (SPEED, MEMORY, sweep.loss_key) if any(math.isfinite(s.median(m)) for s in sweep.settings)]
    if not axes or not metrics:
        return None
    figure = make_subplots(
        len(metrics), len(axes), column_titles=[html.escape(a) for a in axes], shared_yaxes=True,
        vertical_spacing=0.06, horizontal_spacing=0.02,
    )  # fmt: skip
    for row, metric in enumerate(metrics, 1):
        scale = declared(metric).scale
        for column, axis in enumerate(axes, 1):
            found = effects(sweep, axis, metric)
            numbers = [as_number(e.value) for e in found]
            many = len(found) > _MOST_COLORS and None not in numbers
            figure.add_scatter(
                x=numbers if many else [html.escape(e.value) for e in found],
                y=[e.mean / scale for e in found],
                error_y=None if many else {"array": [e.spread / scale for e in found], "thickness": 1.5, "width": 6},
                mode="markers",
                marker={"size": 6 if many else 11, "color": COLORS[(row - 1) % _MOST_COLORS]},
                text=[f"{html.escape(f'{axis}={e.value}')}<br>{e.mean / scale:.4g} ± {e.spread / scale:.2g}, of "
                      f"{e.count} settings" for e in found],
                hovertemplate="%{text}<extra></extra>",
                showlegend=False,
                row=row, col=column,
            )  # fmt: skip
            if many:
                if min(n for n in numbers if n is not None) > 0:
                    figure.update_xaxes(type="log", row=row, col=column)
            else:  # "1e-3" is a name here, and the room at the sides keeps points off the frame
                figure.update_xaxes(type="category", range=[-0.5, len(found) - 0.5], row=row, col=column)
            figure.update_xaxes(showticklabels=row == len(metrics), row=row, col=column)
        figure.update_yaxes(title_text=declared(metric).label, row=row, col=1)
    _lay_out(figure, None, None, 120 + 210 * len(metrics))
    return figure


def forecast(sweep: Sweep) -> Any | None:
    """A point a trial that has both; on the line the forecast is what was measured."""
    import plotly.graph_objects as go

    shown = [t for t in _finished(sweep) if _has(t, "forecast/peak_bytes", MEMORY)]
    if not shown:
        return None
    figure = go.Figure()
    measured = [t.figures[MEMORY] / MIB for t in shown]
    ends = [min(measured) * 0.97, max(measured) * 1.03]
    figure.add_scatter(
        x=ends, y=ends, mode="lines", line={"dash": "dot", "color": _GREY}, name="equal", hoverinfo="skip"
    )
    figure.add_scatter(
        x=measured,
        y=[t.figures["forecast/peak_bytes"] / MIB for t in shown],
        mode="markers",
        marker={"size": 11, "color": COLORS[0], "opacity": 0.7},
        name="trials",
        **_hover(sweep, shown),
    )
    _lay_out(figure, "measured peak, MiB", "forecast peak, MiB", 420)
    return figure


def _lay_out(figure: Any, x: str | None, y: str | None, height: int) -> None:
    figure.update_layout(
        template="plotly_white",
        height=height,
        margin={"l": 70, "r": 20, "t": 60, "b": 60},
        font={"size": 13},
        hoverlabel={"align": "left"},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 1, "xanchor": "right"},
    )
    if x is not None:
        figure.update_layout(xaxis_title=x, yaxis_title=y)


def _note(figure: Any, text: str) -> None:
    figure.add_annotation(
        text=html.escape(text),
        xref="paper",
        yref="paper",
        x=0,
        y=-0.16,
        showarrow=False,
        font={"size": 11, "color": "#555"},
    )


def _axes_for_style(sweep: Sweep) -> tuple[str | None, str | None]:
    """The axes that colour and shape stand for: the first two with few enough values."""
    few = [a for a in sweep.setting_axes if 1 < len({t.setting.get(a, "") for t in sweep.trials}) <= _MOST_COLORS]
    return (few[0] if few else None), (few[1] if len(few) > 1 else None)


def _styles(sweep: Sweep, axis: str | None, styles: Sequence[str]) -> dict[str, str]:
    """Value of the axis -> style; without an axis, one style for all."""
    values = list(dict.fromkeys(t.setting.get(axis, "") if axis else "" for t in sweep.trials))
    return {value: styles[i % len(styles)] for i, value in enumerate(values)}


def _scaled_axis(texts: Sequence[str]) -> tuple[list[float], list[tuple[float, str]]]:
    numbers = [as_number(text) for text in texts]
    if None not in numbers and len(set(texts)) > _MOST_COLORS:
        return _scaled_numbers([n for n in numbers if n is not None])
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


def _finished(sweep: Sweep) -> list[Trial]:
    return [trial for trial in sweep.trials if trial.status == TrialStatus.finished]


def _has(trial: Trial, *keys: str) -> bool:
    return all(math.isfinite(trial.figures.get(key, math.nan)) for key in keys)


def _hover(sweep: Sweep, trials: Sequence[Trial]) -> dict[str, Any]:
    return {
        "text": [_hover_text(t) for t in trials],
        "customdata": [[sweep.url(t)] for t in trials],
        "hovertemplate": "%{text}<extra></extra>",
    }


def _hover_text(trial: Trial) -> str:
    lines = [f"trial {trial.number}", *(f"{key}={value}" for key, value in trial.setting.items())]
    lines += [c.text(trial.figures[c.key]) for c in table_columns("hover") if _has(trial, c.key)]
    return "<br>".join(html.escape(line) for line in lines)


def _label(trial: Trial) -> str:
    values = " ".join(trial.setting.values())
    return html.escape(f"{trial.number}  {values if len(values) <= 60 else values[:59] + '…'}")
