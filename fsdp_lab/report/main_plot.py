"""The report's main picture: the figures that decide, a point for each setting, with its interval."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fsdp_lab.metrics import MEMORY, MIB, SPEED, declared
from fsdp_lab.report.answer import Answer
from fsdp_lab.report.data import SweepData, TrialRow, as_number
from fsdp_lab.report.settings import Setting
from fsdp_lab.report.style import COLORS, GREY, SCALE, coloring, is_numeric, lay_out, setting_text, trial_text
from fsdp_lab.report.tables import MOST, shown_trials, thinned_notes
from fsdp_lab.status import TrialStatus

STOPPED, EXCLUDED = "stopped early", "timing excluded"
WIDEST = 10.0  # an interval whose ends are further apart than this factor runs out of the picture
_CHOSEN = {"yes": "recommended", "by memory": "least memory", "by loss": "by loss alone"}
_WORDS = {MEMORY: "peak memory", SPEED: "samples/s"}
_LISTED = 4  # values of an axis of numbers that may be a list
_SAME = 1e-3  # figures that differ by less than this ratio are one
_MARKERS: dict[str, dict[str, Any]] = {
    "run": {"size": 5, "opacity": 0.55},
    STOPPED: {"size": 9, "symbol": "circle-open", "color": GREY},
    EXCLUDED: {"size": 9, "symbol": "x-thin-open", "color": GREY, "line": {"width": 2}},
}


@dataclass(frozen=True)
class Dimension:
    """One direction of the picture.

    Attributes:
        key: of a metric, or of an axis of the sweep.
        title: for people.
        better: "min" or "max" of a metric; "" for an axis.
        scale: the divisor of a metric's values.
        kind: of the scale that is drawn: `linear`, `log` or `category`.
    """

    key: str
    title: str
    better: str = ""
    scale: float = 1.0
    kind: str = "linear"

    def place(self, value: str | float) -> float | str:
        """Return where a value is drawn."""
        if self.better:
            return float(value) / self.scale
        return html.escape(str(value)) if self.kind == "category" else as_number(str(value)) or 0.0


class MainPlot:
    """The picture of an answer, and its texts.

    Args:
        sweep: of the settings.
        answer: the answer that it illustrates.
        x: from left to right.
        y: from the bottom to the top.
    """

    def __init__(self, sweep: SweepData, answer: Answer, x: Dimension, y: Dimension) -> None:
        self.sweep, self.answer, self.x, self.y = sweep, answer, x, y
        self._r = answer.recommendation
        self._trials = shown_trials(sweep, self._r)
        kept = {trial.number for trial in self._trials}
        self._settings = [
            s for s in self._r.settings.all
            if all(self._has(self._r.value(s, d.key)) for d in (x, y) if d.better)
            and (len(sweep.trials) <= MOST or kept.intersection(s.trials))
        ]  # fmt: skip

    @staticmethod
    def _has(value: float) -> bool:
        return math.isfinite(value)

    @property
    def heading(self) -> str:
        """The heading."""
        text = " against ".join(_WORDS.get(d.key, d.title) for d in (self.y, self.x))
        return text[0].upper() + text[1:]

    @property
    def note(self) -> str:
        """How to read the picture."""
        ways = [("up" if self.y.better == "max" else "down") if self.y.better else ""]
        ways += [("to the right" if self.x.better == "max" else "to the left") if self.x.better else ""]
        sentences = [" and ".join(way for way in ways if way).capitalize() + " is better."]
        if any(self._bars(self._settings)):
            sentences.append("Bars are 95 % intervals of samples/s.")
        click = "; click on it to open its run" if any(map(self.sweep.url, self._trials)) else ""
        sentences.append(f"Hover over a point for its figures{click}.")
        return " ".join([*sentences, *thinned_notes(self.sweep)[:1]])

    def figure(self) -> Any:
        """Return the picture as a Plotly figure."""
        import plotly.graph_objects as go

        figure = go.Figure()
        self._draw_settings(figure)
        self._draw_runs(figure)
        self._draw_front(figure)
        self._draw_recommended(figure)
        lay_out(figure, html.escape(self.x.title), html.escape(self.y.title), 430)
        figure.update_xaxes(type=self.x.kind, automargin=True)
        figure.update_yaxes(type=self.y.kind)
        if SPEED in (self.x.key, self.y.key):  # a wide interval does not squeeze the points
            speeds = [self._r.value(s, SPEED) for s in self._settings]
            if any(self._bars(self._settings)):
                low, high = min(speeds) / math.sqrt(WIDEST), max(speeds) * math.sqrt(WIDEST)
                ends = [i for s in self._settings if (i := self._r.interval(s)) and i.known]
                low, high = max(low, min(i.low for i in ends)), min(high, max(i.high for i in ends))
                room = 0.07 * (high - low)
                update = figure.update_xaxes if self.x.key == SPEED else figure.update_yaxes
                update(range=[max(min(low, min(speeds)) - room, 0), max(high, max(speeds)) + room])
        return figure

    @cached_property
    def _coloring(self) -> Any:
        return coloring(
            self.answer, [d.key for d in (self.x, self.y) if d.better], None if self.x.better else self.x.key
        )

    def _place(self, setting: Setting) -> tuple[float | str, float | str]:
        x, y = (d.place(self._r.value(setting, d.key) if d.better else setting.values[d.key]) for d in (self.x, self.y))
        return x, y

    def _draw_settings(self, figure: Any) -> None:
        colors = self._coloring
        groups: dict[str, list[Setting]] = {}
        for setting in sorted(
            self._settings, key=lambda s: list(colors.colors).index(s.values[colors.axis]) if colors.colors else 0
        ):
            groups.setdefault(colors.name(setting.values), []).append(setting)
        for name, settings in groups.items():
            marker = self._scale_marker(settings) if colors.is_scale else {"color": colors.of(settings[0].values)}
            bars = self._bars(settings)
            figure.add_scatter(
                x=[self._place(s)[0] for s in settings],
                y=[self._place(s)[1] for s in settings],
                mode="markers",
                name=name,
                showlegend=bool(colors.colors),
                marker={"size": 11, "opacity": 0.9, **marker},
                text=[setting_text(self.answer, s) for s in settings],
                customdata=[[self._url(s)] for s in settings],
                hovertemplate="%{text}<extra></extra>",
                **({"error_y" if self.y.key == SPEED else "error_x": self._error_bars(bars)} if any(bars) else {}),
            )

    def _bars(self, settings: Sequence[Setting]) -> list[tuple[float, float] | None]:
        """Return how far the known intervals of speeds reach up and down."""
        if SPEED not in (self.x.key, self.y.key):
            return []
        intervals = [self._r.interval(s) for s in settings]
        return [(i.high - i.value, i.value - i.low) if i and i.known else None for i in intervals]

    def _error_bars(self, bars: Sequence[tuple[float, float] | None]) -> dict[str, Any]:
        up, down = [bar and bar[0] for bar in bars], [bar and bar[1] for bar in bars]
        grey = {"color": GREY} if self._coloring.is_scale else {}
        return {"type": "data", "array": up, "arrayminus": down, "thickness": 1.2, "width": 4, **grey}

    def _scale_marker(self, settings: Sequence[Setting]) -> dict[str, Any]:
        """Return colours of a continuous scale, logarithmic for an axis that was searched so."""
        axis = self._coloring.axis or ""
        numbers = [as_number(s.values[axis]) or 0.0 for s in settings]
        bar: dict[str, Any] = {"title": {"text": html.escape(axis), "side": "right"}, "thickness": 12}
        if axis in self.sweep.log_axes and min(numbers) > 0:
            numbers = [math.log10(number) for number in numbers]
            ticks = [min(numbers) + (max(numbers) - min(numbers)) * part / 4 for part in range(5)]
            bar |= {"tickvals": ticks, "ticktext": [f"{10**tick:.2g}" for tick in ticks]}
        return {"color": numbers, "colorscale": SCALE, "showscale": True, "colorbar": bar}

    def _kind(self, trial: TrialRow) -> str:
        """Return how a run is drawn; "" for one that its setting's point shows."""
        if trial.status is TrialStatus.stopped:
            return STOPPED
        if SPEED in (self.x.key, self.y.key) and trial.timing_excluded is not None:
            return EXCLUDED
        setting = self._r.settings.of_trial[trial.number]
        return "run" if trial.status is TrialStatus.finished and len(setting.trials) > 1 else ""

    def _draw_runs(self, figure: Any) -> None:
        """Draw single runs: dots for those of repeated settings, grey for those that are stopped or excluded."""
        for kind, marker in _MARKERS.items():
            trials = [t for t in self._trials if self._kind(t) == kind and self._run_place(t)]
            if not trials:
                continue
            colors = {"color": [self._coloring.of(t.setting) for t in trials]} if kind == "run" else {}
            places = [self._run_place(t) or ("", "") for t in trials]
            figure.add_scatter(
                x=[x for x, _ in places],
                y=[y for _, y in places],
                mode="markers",
                name=kind,
                marker={**marker, **colors},
                text=[trial_text(t, self._r.settings.loss_key, "" if kind == "run" else kind) for t in trials],
                customdata=[[self.sweep.url(t)] for t in trials],
                hovertemplate="%{text}<extra></extra>",
            )

    def _run_place(self, trial: TrialRow) -> tuple[float | str, float | str] | None:
        values = [trial.figures.get(d.key, math.nan) if d.better else trial.setting[d.key] for d in (self.x, self.y)]
        if not all(isinstance(value, str) or math.isfinite(value) for value in values):
            return None
        return self.x.place(values[0]), self.y.place(values[1])

    def _draw_front(self, figure: Any) -> None:
        """Draw the Pareto front as stairs: between two points nothing better was measured."""
        points = sorted(self._place(s) for s in self._settings if s in self._r.front)
        if not (self.x.better and self.y.better) or len(self._r.axes) > 2 or len(points) < 2:
            return
        figure.add_scatter(
            x=[x for x, _ in points],
            y=[y for _, y in points],
            mode="lines",
            line={"shape": "hv" if self.x.better == "min" else "vh", "dash": "dot", "color": GREY, "width": 1.5},
            name="Pareto front",
            zorder=-1,
            hoverinfo="skip",
        )

    def _draw_recommended(self, figure: Any) -> None:
        if self.answer.setting in self._settings:
            x, y = self._place(self.answer.setting)
            figure.add_scatter(
                x=[x],
                y=[y],
                mode="markers",
                marker={"symbol": "circle-open", "size": 22, "color": COLORS[6], "line": {"width": 2.5}},
                name=_CHOSEN[self._r.basis],
                hoverinfo="skip",
            )

    def _url(self, setting: Setting) -> str:
        """Return the address of a setting's run, if it has only one."""
        by_number = {trial.number: trial for trial in self._trials}
        return self.sweep.url(by_number[setting.trials[0]]) if len(setting.trials) == 1 else ""


def main_plot(sweep: SweepData, answer: Answer) -> MainPlot | None:
    """Return the picture of an answer; None if there is nothing to compare.

    Its directions are the first two metrics of the answer. One that is the same everywhere is replaced by the axis that
    explains most of the other: the numbers of a search, else the one that colours would show.
    """
    r = answer.recommendation
    metrics = [_metric(sweep, *axis) for axis in r.axes[:2]]
    differing = [d for d in metrics if _differs([r.value(s, d.key) for s in r.settings.all])]
    if len(differing) == 2:
        return MainPlot(sweep, answer, *differing)
    if not differing or not r.settings.axes:
        return None
    counts = {axis: len({s.values[axis] for s in r.settings.all}) for axis in r.settings.axes}
    sampled = [axis for axis, number in counts.items() if number > _LISTED and is_numeric(answer, axis)]
    axis = max(sampled, key=counts.__getitem__) if sampled else coloring(answer, [differing[0].key]).axis
    return MainPlot(sweep, answer, _axis(sweep, answer, axis or r.settings.axes[0]), differing[0])


def _metric(sweep: SweepData, key: str, better: str) -> Dimension:
    metric = declared(key)
    if key != MEMORY:
        return Dimension(key, metric.label, better, metric.scale)
    most = max((trial.figures.get(MEMORY, 0.0) for trial in sweep.trials), default=0.0)
    unit, scale = ("GiB", MIB * 1024) if most >= 1000 * MIB else ("MiB", MIB)
    return Dimension(key, f"peak memory of a worker, {unit}", better, scale)


def _axis(sweep: SweepData, answer: Answer, axis: str) -> Dimension:
    if not is_numeric(answer, axis):
        return Dimension(axis, axis, kind="category")
    above_0 = all((as_number(s.values[axis]) or 0.0) > 0 for s in answer.recommendation.settings.all)
    return Dimension(axis, axis, kind="log" if axis in sweep.log_axes and above_0 else "linear")


def _differs(figures: Sequence[float]) -> bool:
    known = [figure for figure in figures if math.isfinite(figure)]
    return len(known) > 1 and max(known) - min(known) > _SAME * max(abs(figure) for figure in known)
