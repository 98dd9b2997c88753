"""The report's main picture: the figures that decide, a point for each setting, with its interval."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fsdp_lab.metrics import MEMORY, SPEED
from fsdp_lab.report.answer import Answer
from fsdp_lab.report.choice import value
from fsdp_lab.report.data import Setting, SweepData, as_number
from fsdp_lab.report.dimensions import Dimension, Point, dimensions, run_points, setting_points
from fsdp_lab.report.labels import place_labels
from fsdp_lab.report.speed import Interval, Speeds
from fsdp_lab.report.style import COLORS, GREY, SCALE, Coloring, coloring, lay_out, setting_text, trial_text
from fsdp_lab.report.thin import MOST, shown_trials, thinned_note
from fsdp_lab.status import TrialStatus

STOPPED, SHARED = "stopped early", "speed does not count: shared cores"
MOST_LABELS = 8  # settings whose values stand beside their points
WIDEST = 10.0  # an interval whose ends are further apart than this factor runs out of the picture
_CHOSEN = {"yes": "recommended", "by memory": "least memory", "by loss": "by loss alone"}
_WORDS = {MEMORY: "peak memory", SPEED: "samples/s"}


@dataclass(frozen=True)
class MainPlot:
    """The content of the picture, and its texts.

    Attributes:
        sweep: of the settings.
        answer: the answer that it illustrates.
        x: from left to right.
        y: from the bottom to the top.
        settings: a point each.
        runs: a point each.
    """

    sweep: SweepData
    answer: Answer
    x: Dimension
    y: Dimension
    settings: list[Point]
    runs: list[Point]

    @property
    def heading(self) -> str:
        """The heading, as HTML."""
        text = " against ".join(_WORDS.get(d.key, d.title) for d in (self.y, self.x))
        return html.escape(text[0].upper() + text[1:])

    @property
    def note(self) -> str:
        """How to read the picture, as HTML."""
        ways = [("up" if self.y.better == "max" else "down") if self.y.better else ""]
        ways += [("to the right" if self.x.better == "max" else "to the left") if self.x.better else ""]
        sentences = [" and ".join(way for way in ways if way).capitalize() + " is better."]
        if any(interval.known for _, interval in self._intervals()):
            sentences.append("Bars are 95 % intervals of samples/s.")
        if any(_is_wide(interval) for _, interval in self._intervals()):
            sentences.append(f"Bars wider than {WIDEST:g}× are cut off.")
        if any(self._kind(point) == "run" for point in self.runs):
            sentences.append("Small dots are single runs.")
        click = "; click on it to open its run" if self._has_urls else ""
        sentences.append(f"Hover over a point for its figures{click}.")
        sentences += [cut] if (cut := thinned_note(self.sweep)) else []
        return " ".join(sentences)

    def figure(self) -> Any:
        """Return the picture as a Plotly figure."""
        import plotly.graph_objects as go

        figure = go.Figure()
        self._draw_settings(figure)
        self._draw_runs(figure)
        self._draw_front(figure)
        self._draw_recommended(figure)
        lay_out(figure, html.escape(self.x.title), html.escape(self.y.title), 430)
        for dimension, update, of in (
            (self.x, figure.update_xaxes, "x"),
            (self.y, figure.update_yaxes, "y"),
        ):
            ends = self._range(dimension, of)
            update(type=dimension.kind, range=ends)
            if dimension.words:
                names = [html.escape(word) for word in dimension.words]
                update(tickvals=list(range(len(names))), ticktext=names, showgrid=False, zeroline=False)
            if dimension.kind == "log":  # no "100µ"; whole decades, where there are some
                update(exponentformat="none", dtick=1 if ends[1] - ends[0] > 1.5 else "D2")
        return figure

    @cached_property
    def _coloring(self) -> Coloring:
        speeds = Speeds(self.sweep.runs)
        metrics = [d.key for d in (self.x, self.y) if d.better]
        by = [{s.name: value(self.sweep, speeds, s, metric) for s in self.sweep.settings} for metric in metrics]
        return coloring(self.sweep, by, without=None if self.x.better else self.x.key)

    @property
    def _has_urls(self) -> bool:
        return any(self.sweep.url(trial) for trial in self.sweep.trials)

    def _intervals(self) -> Iterator[tuple[Point, Interval]]:
        """Yield the settings whose samples/s are shown, with their intervals."""
        if SPEED in (self.x.key, self.y.key):
            for point in self.settings:
                if point.setting.name in self.answer.intervals:
                    yield point, self.answer.intervals[point.setting.name]

    def _kind(self, point: Point) -> str:
        """Return how a run is drawn; "" for one at the same position as its setting's point."""
        assert point.trial is not None
        if point.trial.status is TrialStatus.stopped:
            return STOPPED
        if SPEED in (self.x.key, self.y.key) and self.sweep.shared(point.trial):
            return SHARED
        return "" if (point.setting.name, *_rounded(point)) in self._places else "run"

    @cached_property
    def _places(self) -> set[tuple[str, ...]]:
        return {(point.setting.name, *_rounded(point)) for point in self.settings}

    def _x(self, point: Point) -> float:
        """Return where a point is drawn: at a word, points of one colour are next to those of another."""
        colors = list(self._coloring.colors)
        own = point.setting.values.get(self._coloring.axis or "", "")
        if not self.x.words or own not in colors:
            return point.x
        return point.x + (colors.index(own) - (len(colors) - 1) / 2) * 0.5 / len(colors)

    def _draw_settings(self, figure: Any) -> None:
        colors = self._coloring
        groups: dict[str, list[Point]] = {value: [] for value in colors.colors}
        for point in self.settings:
            name = "" if colors.is_scale else point.setting.values.get(colors.axis or "", "")
            groups.setdefault(name, []).append(point)
        labels = self._labels()
        for name, points in groups.items():
            if not points:
                continue
            one_color = {"color": colors.of(points[0].setting.values)}
            marker = self._scale_marker(points) if colors.is_scale else one_color
            texts = [labels.get(point.setting.name, ("", "middle right")) for point in points]
            figure.add_scatter(
                x=[self._x(point) for point in points],
                y=[point.y for point in points],
                mode="markers+text" if any(text for text, _ in texts) else "markers",
                name="settings" if colors.is_scale else colors.name(name),
                showlegend=colors.axis is not None and not colors.is_scale,
                marker={"size": 11, "opacity": 0.9, **marker},
                texttemplate=[html.escape(text) for text, _ in texts],
                textposition=[position for _, position in texts],
                text=[self._hover(point.setting) for point in points],
                customdata=[[self._url(point.setting)] for point in points],
                hovertemplate="%{text}<extra></extra>",
                **self._bars(points),
            )

    def _bars(self, points: Sequence[Point]) -> dict[str, Any]:
        """Return error bars for known intervals."""
        known = {id(point): interval for point, interval in self._intervals() if interval.known}
        if not any(id(point) in known for point in points):
            return {}
        intervals = [known.get(id(point)) for point in points]
        bars = {
            "type": "data",
            "array": [i.high - i.value if i else None for i in intervals],
            "arrayminus": [i.value - i.low if i else None for i in intervals],
            "thickness": 1.2,
            "width": 4,
        }
        if self._coloring.is_scale:
            bars["color"] = GREY
        return {"error_y" if self.y.key == SPEED else "error_x": bars}

    def _scale_marker(self, points: Sequence[Point]) -> dict[str, Any]:
        """Return colours of a continuous scale, logarithmic for an axis that was searched so."""
        axis = self._coloring.axis or ""
        numbers = [as_number(point.setting.values[axis]) or 0.0 for point in points]
        bar: dict[str, Any] = {
            "title": {"text": html.escape(axis), "side": "right"},
            "thickness": 12,
            "outlinewidth": 0,
        }
        if axis in self.sweep.log_axes and min(numbers) > 0:
            numbers = [math.log10(number) for number in numbers]
            low, high = min(numbers), max(numbers)
            ticks = [low + (high - low) * part / 4 for part in range(5)]
            bar |= {"tickvals": ticks, "ticktext": [f"{10**tick:.2g}" for tick in ticks]}
        return {"color": numbers, "colorscale": SCALE, "showscale": True, "colorbar": bar}

    def _draw_runs(self, figure: Any) -> None:
        """Draw single runs: dots for those of repeated settings, grey for those that do not count."""
        markers: dict[str, dict[str, Any]] = {
            "run": {"size": 5, "opacity": 0.55},
            STOPPED: {"size": 9, "symbol": "circle-open", "color": GREY},
            SHARED: {"size": 9, "symbol": "x-thin-open", "color": GREY, "line": {"width": 2}},
        }
        for kind, marker in markers.items():
            points = [point for point in self.runs if self._kind(point) == kind]
            if not points:
                continue
            if kind == "run":
                marker = {**marker, "color": [self._coloring.of(point.setting.values) for point in points]}
            trials = [point.trial for point in points if point.trial is not None]
            figure.add_scatter(
                x=[self._x(point) for point in points],
                y=[point.y for point in points],
                mode="markers",
                name=kind,
                showlegend=kind != "run",
                marker=marker,
                text=[trial_text(trial, self.sweep.loss_key, "" if kind == "run" else kind) for trial in trials],
                customdata=[[self.sweep.url(trial)] for trial in trials],
                hovertemplate="%{text}<extra></extra>",
            )

    def _draw_front(self, figure: Any) -> None:
        """Draw the Pareto front as stairs: between two points nothing better was measured."""
        if not (self.x.better and self.y.better) or len(self.answer.axes) > 2:
            return
        points = sorted((point.x, point.y) for point in self.settings if point.setting.name in self.answer.front)
        if len(points) < 2:
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
        chosen = [point for point in self.settings if point.setting is self.answer.setting]
        if chosen:
            figure.add_scatter(
                x=[self._x(chosen[0])],
                y=[chosen[0].y],
                mode="markers",
                marker={"symbol": "circle-open", "size": 22, "color": COLORS[6], "line": {"width": 2.5}},
                name=_CHOSEN[self.answer.basis],
                hoverinfo="skip",
            )

    def _hover(self, setting: Setting) -> str:
        speed = self.answer.intervals.get(setting.name)
        why_not = self.answer.why_not.get(setting.name, "")
        return setting_text(setting, speed, self.sweep.loss_key, f"does not qualify: {why_not}" if why_not else "")

    def _url(self, setting: Setting) -> str:
        """Return the address of a setting's run, if it has only one."""
        return self.sweep.url(setting.trials[0]) if len(setting.trials) == 1 else ""

    def _labels(self) -> dict[str, tuple[str, str]]:
        """Return name of a setting -> its label and the label's position: the values that no colour or axis shows."""
        shown = {self._coloring.axis, self.x.key}
        texts = {
            p.setting.name: " ".join(v for k, v in p.setting.values.items() if k not in shown) for p in self.settings
        }
        if len(self.settings) > MOST_LABELS:
            return {}
        places = {p.setting.name: (self._part(self._x(p), "x"), self._part(p.y, "y")) for p in self.settings}
        return place_labels(texts, places)

    def _part(self, place: float, of: str) -> float:
        """Return where a number lies between the ends of the drawing, from 0 to 1."""
        dimension = self.x if of == "x" else self.y
        low, high = self._range(dimension, of)
        return ((math.log10(place) if dimension.kind == "log" else place) - low) / (high - low)

    def _range(self, dimension: Dimension, of: str) -> tuple[float, float]:
        """Return the ends of the drawing, as Plotly takes them: of all points, and of narrow intervals."""
        if dimension.words:
            return -0.5, len(dimension.words) - 0.5
        places = [getattr(point, of) for point in (*self.settings, *self.runs)]
        if dimension.key == SPEED:
            for _, interval in self._intervals():
                if interval.known:
                    reach = math.sqrt(WIDEST)
                    places.append(max(interval.low, interval.value / reach))
                    places.append(min(interval.high, interval.value * reach))
        if dimension.kind == "log":
            places = [math.log10(place) for place in places]
        low, high = min(places), max(places)
        room = (high - low) * 0.07 or abs(high) * 0.07 or 1.0
        floor = 0.0 if low >= 0 and dimension.kind == "linear" else -math.inf
        return max(low - room, floor), high + room


def main_plot(sweep: SweepData, answer: Answer) -> MainPlot | None:
    """Return the picture of an answer; None if there is nothing to compare."""
    chosen = dimensions(sweep, answer.axes)
    if chosen is None:
        return None
    settings, runs = setting_points(sweep, *chosen), run_points(sweep, *chosen)
    shown = {trial.number for trial in shown_trials(sweep, answer)}
    if len(settings) > MOST:
        settings = [p for p in settings if any(trial.number in shown for trial in p.setting.trials)]
    runs = [p for p in runs if p.trial is not None and p.trial.number in shown]
    return MainPlot(sweep, answer, *chosen, settings, runs) if settings or runs else None


def _rounded(point: Point) -> tuple[str, str]:
    """Return a point's position, rounded so that the last digits of estimates do not matter."""
    return f"{point.x:.9g}", f"{point.y:.9g}"


def _is_wide(interval: Interval) -> bool:
    return interval.known and interval.high > WIDEST * interval.low
