"""The pictures of a report's page, as Plotly figures: what decides, losses by epoch, and memory by category."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from textwrap import shorten
from typing import TYPE_CHECKING, Any, NamedTuple

from fsdp_lab.config.metrics import MEMORY, MIB, SPEED, declared, table_columns
from fsdp_lab.config.status import TrialStatus
from fsdp_lab.record.sweep import SweepRecord
from fsdp_lab.record.trial import TrialRecord
from fsdp_lab.report.answer import Answer
from fsdp_lab.report.recommend import Recommendation
from fsdp_lab.report.render import lines_of, text_of
from fsdp_lab.report.speed import Interval

if TYPE_CHECKING:
    import pandas as pd

MOST = 500  # trials in the table and the pictures
# Okabe and Ito's colours, which colour-blind readers can tell apart; on white their yellow is too faint for lines.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#8C6D31")
GREY = "#888888"
_MOST_COLORS = 6  # an axis with more values gets no colours
_LISTED = 4  # a single metric is drawn over an axis with more numbers than this
_SAME = 1e-3  # figures that differ by less than this ratio are equal
_STOPPED = "stopped early"
_WIDEST = 3.0  # times the highest speed: a higher end of an interval is cut off
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
    note: str


def figures(sweep: SweepRecord, answer: Answer) -> list[Chart]:
    """Return every chart with content, the main one first."""
    charts = (main_chart(sweep, answer), losses(sweep, answer), breakdown(sweep, answer))
    return [chart for chart in charts if chart is not None]


def main_chart(sweep: SweepRecord, answer: Answer) -> Chart | None:
    """Return the figures that decide: a point with its interval for each setting; None if all are equal.

    A metric that is the same everywhere is replaced by an axis.
    """
    import plotly.express as px

    r = answer.recommendation
    table = _settings_table(sweep, answer)
    better = dict(r.axes[:2])
    differing = sorted((metric for metric in better if _differs(table[metric])), key=lambda metric: metric == SPEED)
    if not differing or (len(differing) < 2 and not r.settings.axes):
        return None
    x, y = differing if len(differing) == 2 else (_drawn_axis(table, r.settings.axes), differing[0])
    points = table.dropna(subset=differing)
    numbers = None if x in better else _numbers(points[x])
    if numbers is not None:
        points = points.assign(**{x: numbers})
    by = _color_axis(points, [axis for axis in r.settings.axes if axis != x])
    names = {value: html.escape(f"{by}={value}") for value in _in_order(r.settings.frame[by])} if by else {}
    if by:
        points = points.assign(color=points[by].map(names))
    has_bars = y == SPEED and bool(points["above"].notna().any())
    figure = px.scatter(
        points, x=x, y=y, color="color" if by else None, custom_data=["url", "text"],
        error_y="above" if has_bars else None, error_y_minus="below" if has_bars else None,
        color_discrete_map=dict(zip(names.values(), COLORS, strict=False)), color_discrete_sequence=COLORS,
        category_orders={"color": list(names.values())}, render_mode="svg",
        log_x=numbers is not None and bool(numbers.min() > 0 and numbers.max() >= 10 * numbers.min()),
    )  # fmt: skip
    figure.update_traces(marker={"size": 11, "opacity": 0.9}, hovertemplate="%{customdata[1]}<extra></extra>")
    if by is None:
        figure.update_traces(name="settings")
    front = points[points["front"]].sort_values([x, y])
    if len(differing) == 2 and len(r.axes) == 2 and len(front) > 1:  # stairs: between two points nothing is better
        line = {"shape": "hv" if better[x] == "min" else "vh", "dash": "dot", "color": GREY, "width": 1.5}
        drawn = {"mode": "lines", "line": line, "zorder": -1, "hoverinfo": "skip"}
        figure.add_scatter(x=front[x], y=front[y], name="Pareto front", **drawn)
    chosen = points[points["chosen"]]
    if len(chosen):
        ring = {"symbol": "circle-open", "size": 22, "color": COLORS[6], "line": {"width": 2.5}}
        drawn = {"mode": "markers", "marker": ring, "hoverinfo": "skip"}
        figure.add_scatter(x=chosen[x], y=chosen[y], name="recommended", **drawn)
    if has_bars and (points["above"] + points[y]).max() > _WIDEST * points[y].max():
        figure.update_yaxes(range=[0, _WIDEST * points[y].max()])
    labels = {key: declared(key).label if key in better else key for key in (y, x)}
    _lay_out(figure, html.escape(labels[x]), labels[y], 430)
    heading = " against ".join(labels.values()).replace(declared(MEMORY).label, "peak memory")
    note = text_of("words.j2", "chart", better[y], better.get(x), has_bars, points["url"].any())
    return Chart("main", heading[0].upper() + heading[1:], figure, note)


def _settings_table(sweep: SweepRecord, answer: Answer) -> pd.DataFrame:
    """Return a row for each shown setting: its values, its figures, its interval, its text and its run's address."""
    import pandas as pd

    r = answer.recommendation
    shown = {trial.number: trial for trial in shown_trials(sweep, r)}
    rows = []
    for setting in r.settings.all:
        trials = [shown[number] for number in setting.trials if number in shown]
        if not trials:
            continue
        speed, known = setting.speed or Interval(math.nan), table_columns("terminal", setting.figures)
        columns = [column for column in known if column.key != SPEED and column.key in setting.figures]
        lines = lines_of("words.j2", "point", setting, columns, answer.why_not.get(setting.name))
        rows.append({
            **setting.values,
            **{metric: setting.figure(metric) / declared(metric).scale for metric, _ in r.axes},
            "above": speed.high - speed.value,
            "below": speed.value - speed.low,
            "text": "<br>".join(map(html.escape, lines)),
            "url": url_of(sweep, trials[0]) if len(trials) == len(setting.trials) == 1 else "",
            "front": setting in r.front,
            "chosen": setting is r.setting,
        })  # fmt: skip
    return pd.DataFrame(rows)


def _numbers(values: pd.Series[Any]) -> pd.Series[float] | None:
    """Return the values of an axis as numbers; None if one is a word."""
    import pandas as pd

    numbers = pd.to_numeric(values, errors="coerce")
    return None if numbers.isna().any() else numbers


def _in_order(values: pd.Series[Any]) -> list[str]:
    """Return each value of an axis once: numbers sorted, words in their order."""
    known = values.drop_duplicates()
    numbers = _numbers(known)
    return list(known if numbers is None else known[numbers.sort_values().index])


def _drawn_axis(table: pd.DataFrame, axes: Sequence[str]) -> str:
    """Return the axis to draw a single metric over: the first with many numbers, else the first."""
    many = (axis for axis in axes if table[axis].nunique() > _LISTED and _numbers(table[axis]) is not None)
    return next(many, axes[0])


def _color_axis(table: pd.DataFrame, axes: Sequence[str]) -> str | None:
    """Return the axis whose values have colours: the first that has few."""
    return next((axis for axis in axes if 1 < table[axis].nunique() <= _MOST_COLORS), None)


def _differs(values: pd.Series[Any]) -> bool:
    known = values.dropna()
    return len(known) > 1 and known.max() - known.min() > _SAME * known.abs().max()


def losses(sweep: SweepRecord, answer: Answer) -> Chart | None:
    """Return a line for each trial that reported, even if it did not finish; grey for one that was stopped early."""
    import pandas as pd
    import plotly.express as px

    settings = answer.recommendation.settings
    key, by = settings.loss_key, _color_axis(settings.frame, settings.axes)
    names = [html.escape(f"{by}={value}") for value in _in_order(settings.frame[by])] if by else ["trials"]
    frame = pd.DataFrame([
        {"trial": trial.number, "epoch": epoch["epoch"], key: epoch[key], "url": url_of(sweep, trial),
         "name": html.escape(trial.name), "color": _STOPPED if trial.status is TrialStatus.stopped
         else html.escape(f"{by}={trial.setting.get(by, '')}") if by else "trials"}
        for trial in shown_trials(sweep, answer.recommendation) for epoch in trial.epochs if key in epoch
    ])  # fmt: skip
    if frame.empty:
        return None
    figure = px.line(
        frame, x="epoch", y=key, color="color", line_group="trial", markers=True, custom_data=["url", "name"],
        category_orders={"color": names}, color_discrete_map={**dict(zip(names, COLORS, strict=False)), _STOPPED: GREY},
        render_mode="svg",
    )  # fmt: skip
    figure.update_traces(hovertemplate="%{customdata[1]}<br>epoch %{x}: %{y:.4~r}<extra></extra>", opacity=0.8)
    _lay_out(figure, "epoch", declared(key).label, 480)
    figure.update_xaxes(tickformat="d", dtick=max(1, round(frame["epoch"].max() / 12)))
    return Chart("losses", "Loss by epoch", figure, "")


def breakdown(sweep: SweepRecord, answer: Answer) -> Chart | None:
    """Return a bar for each finished trial, the smallest on top: the peak of its largest worker by category."""
    import pandas as pd
    import plotly.express as px

    trials = [
        trial for trial in shown_trials(sweep, answer.recommendation)
        if trial.status is TrialStatus.finished and any(f"memory/{c}_bytes" in trial.figures for c in _CATEGORY_COLORS)
    ]  # fmt: skip
    if not trials:
        return None
    trials.sort(key=lambda trial: trial.figures.get(MEMORY, math.inf), reverse=True)  # Plotly draws from the bottom
    rows = []
    for trial in trials:
        text = f"{trial.number} {' '.join(trial.setting.values())}"
        bar = {"trial": html.escape(shorten(text, 62, placeholder=" …")), "url": url_of(sweep, trial)}
        sizes = {c: trial.figures.get(f"memory/{c}_bytes", 0.0) / MIB for c in _CATEGORY_COLORS}
        rows += [{**bar, "category": category, "MiB": size} for category, size in sizes.items()]
    frame = pd.DataFrame(rows)
    frame = frame[frame.groupby("category")["MiB"].transform("max") > 0]
    figure = px.bar(
        frame, x="MiB", y="trial", color="category", orientation="h", custom_data=["url"],
        color_discrete_map=_CATEGORY_COLORS,
    )  # fmt: skip
    figure.update_traces(marker_line_width=0, hovertemplate="%{y}<br>%{fullData.name} %{x:,.4~r} MiB<extra></extra>")
    per_bar = 26 if len(trials) <= 40 else 15
    _lay_out(figure, "MiB at the peak of the largest worker", "", 160 + per_bar * len(trials))
    figure.update_layout(bargap=0.15)
    figure.update_yaxes(automargin=True, tickfont={"size": 12 if per_bar > 20 else 10}, dtick=1)
    note = "Memory by category at the peak of the largest worker."
    return Chart("breakdown", "Peak memory by category", figure, note)


def _lay_out(figure: Any, x: str, y: str, height: int) -> None:
    """Give a figure its frame; the page colours text and grid."""
    figure.update_layout(
        template="plotly_white",
        height=height,
        margin={"l": 70, "r": 20, "t": 40, "b": 50},
        font={"size": 13},
        hoverlabel={"align": "left"},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 1, "xanchor": "right", "title": None},
        xaxis={"title": x, "automargin": True},
        yaxis_title=y,
    )


def shown_trials(sweep: SweepRecord, r: Recommendation) -> list[TrialRecord]:
    """Return up to `MOST` trials, in order: the recommended setting's, the Pareto front's, then the first others."""
    chosen = r.setting.trials if r.setting else ()
    front = {number for setting in r.front for number in setting.trials}
    ranked = sorted(sweep.trials, key=lambda trial: (trial.number not in chosen, trial.number not in front))
    return sorted(ranked[:MOST], key=lambda trial: trial.number)


def url_of(sweep: SweepRecord, trial: TrialRecord) -> str:
    """Return the address of a trial's run; "" if not known."""
    return f"{sweep.runs_url}/{trial.run_id}" if sweep.runs_url and trial.run_id else ""
