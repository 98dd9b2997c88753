"""Common parts of the report's figures: colours, texts beside a point, and the frame of a figure."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_lab.metrics import SPEED, Metric, table_columns
from fsdp_lab.report.answer import memory_text, speed_text
from fsdp_lab.report.data import Setting, SweepData, TrialRow, as_number
from fsdp_lab.report.effects import share_explained
from fsdp_lab.report.speed import Interval

# Okabe and Ito's colours, which colour-blind readers can tell apart; on white their yellow is too faint for lines.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#8C6D31")
GREY = "#888888"
MOST_COLORS = 6  # more values of an axis than these are not told apart by colours
SCALE = ((0.0, "#2F86C8"), (0.5, "#B39DB5"), (1.0, "#D55E00"))  # of numbers; seen on white and on black


@dataclass(frozen=True)
class Coloring:
    """The meaning of colours: the values of one axis.

    Attributes:
        axis: None: all have one colour.
        colors: value -> colour, numbers in ascending order; empty for a scale.
        is_scale: the axis has more numbers than there are colours, so a continuous scale shows them.
    """

    axis: str | None
    colors: dict[str, str]
    is_scale: bool = False

    def of(self, values: Mapping[str, str]) -> str:
        """Return the colour of a setting or trial, by its values."""
        return self.colors.get(values.get(self.axis or "", ""), GREY if self.axis else COLORS[0])

    def name(self, value: str) -> str:
        """Return the value's name in the legend."""
        return html.escape(f"{self.axis}={value}") if self.axis else "settings"


def coloring(
    sweep: SweepData, by: Sequence[Mapping[str, float]], without: str | None = None, scale: bool = True
) -> Coloring:
    """Return a coloring by the axis that explains most of these figures.

    Args:
        sweep: of the settings.
        by: for each figure, name of a setting -> its value.
        without: an axis that the figure shows in another way; None: none.
        scale: whether a continuous scale can be drawn.
    """
    able = []
    for axis in sweep.setting_axes:
        count = len({s.values[axis] for s in sweep.settings})
        if axis != without and count > 1 and (count <= MOST_COLORS or (scale and is_numeric(sweep, axis))):
            able.append(axis)
    if not able:
        return Coloring(None, {})
    axis = max(able, key=lambda axis: sum(share_explained(sweep, axis, values) for values in by))
    values = list(dict.fromkeys(s.values[axis] for s in sweep.settings))
    if is_numeric(sweep, axis):
        values.sort(key=lambda value: as_number(value) or 0.0)
    if len(values) > MOST_COLORS:
        return Coloring(axis, {}, is_scale=True)
    return Coloring(axis, dict(zip(values, COLORS, strict=False)))


def is_numeric(sweep: SweepData, axis: str) -> bool:
    """Whether every value of the axis is a number."""
    return all(as_number(s.values.get(axis, "")) is not None for s in sweep.settings)


def lay_out(figure: Any, x: str | None, y: str | None, height: int) -> None:
    """Give a figure its frame; the page colours text and grid."""
    figure.update_layout(
        template="plotly_white",
        height=height,
        margin={"l": 70, "r": 20, "t": 40, "b": 50},
        font={"size": 13},
        hoverlabel={"align": "left"},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 1, "xanchor": "right"},
    )
    if x is not None:
        figure.update_layout(xaxis_title=x, yaxis_title=y)


def setting_text(setting: Setting, speed: Interval | None, loss_key: str, why_not: str) -> str:
    """Return the text over a setting's point: its figures and the interval of its speed."""
    figures = {key: setting.median(key) for trial in setting.finished for key in trial.figures}
    numbers = ", ".join(str(trial.number) for trial in setting.trials[:6]) + (" …" if len(setting.trials) > 6 else "")
    many = len(setting.trials) > 1
    head = [*(f"{key}={value}" for key, value in setting.values.items()), f"trial{'s' if many else ''} {numbers}"]
    return _lines([*head, *_figure_lines(figures, speed, loss_key), *([why_not] if why_not else [])])


def trial_text(trial: TrialRow, loss_key: str, note: str = "") -> str:
    """Return the text over a trial's point."""
    head = [f"trial {trial.number}", *(f"{key}={value}" for key, value in trial.setting.items())]
    speed = trial.figures.get(SPEED, math.nan)
    measured = Interval(speed) if math.isfinite(speed) else None
    return _lines([*head, *_figure_lines(trial.figures, measured, loss_key), *([note] if note else [])])


def _figure_lines(figures: Mapping[str, float], speed: Interval | None, loss_key: str) -> list[str]:
    lines = [speed_text(speed)] if speed else []
    shown = [column for column in table_columns("hover") if column.key != SPEED]
    lines += [_hover_line(c, figures[c.key]) for c in shown if math.isfinite(figures.get(c.key, math.nan))]
    if loss_key not in [column.key for column in shown] and math.isfinite(loss := figures.get(loss_key, math.nan)):
        lines.append(f"{loss_key} {loss:#.4g}")
    return lines


def _hover_line(column: Metric, value: float) -> str:
    """Return a metric in its own format; bytes as text with their unit."""
    return column.form.format(memory_text(value) if column.unit == "bytes" else four_digits(value / column.scale))


def four_digits(value: float) -> float:
    """Return the number rounded to four significant digits."""
    return float(f"{value:.4g}")


def _lines(lines: Sequence[str]) -> str:
    return "<br>".join(html.escape(line) for line in lines)
