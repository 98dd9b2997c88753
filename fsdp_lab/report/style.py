"""Common parts of the report's figures: colours, texts beside a point, and the frame of a figure."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fsdp_lab.metrics import SPEED, Metric, table_columns
from fsdp_lab.report.answer import Answer, numbers
from fsdp_lab.report.data import TrialRow, as_number
from fsdp_lab.report.settings import Setting
from fsdp_lab.report.speed import Interval
from fsdp_lab.report.texts import memory_text, speed_text

if TYPE_CHECKING:
    import pandas as pd

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

    def name(self, values: Mapping[str, str]) -> str:
        """Return the name of a setting's or trial's colour in the legend."""
        return html.escape(f"{self.axis}={values.get(self.axis, '')}") if self.axis and self.colors else "settings"


def coloring(answer: Answer, metrics: Sequence[str], without: str | None = None, scale: bool = True) -> Coloring:
    """Return a coloring by the axis that explains most of these metrics.

    Args:
        answer: with the settings.
        metrics: that the figure shows.
        without: an axis that the figure shows in another way; None: none.
        scale: whether a continuous scale can be drawn.
    """
    table = setting_table(answer, metrics)
    able = []
    for axis in answer.recommendation.settings.axes:
        number = table[axis].nunique()
        if axis != without and number > 1 and (number <= MOST_COLORS or (scale and is_numeric(answer, axis))):
            able.append(axis)
    if not able:
        return Coloring(None, {})
    axis = max(able, key=lambda axis: sum(_share_explained(table, axis, metric) for metric in metrics))
    values = list(dict.fromkeys(table[axis]))
    if is_numeric(answer, axis):
        values.sort(key=lambda value: as_number(value) or 0.0)
    if len(values) > MOST_COLORS:
        return Coloring(axis, {}, is_scale=True)
    return Coloring(axis, dict(zip(values, COLORS, strict=False)))


def setting_table(answer: Answer, metrics: Sequence[str]) -> pd.DataFrame:
    """Return a row for each setting: the values of its axes, and its figures."""
    import pandas as pd

    r = answer.recommendation
    rows = [{**s.values, **{metric: r.value(s, metric) for metric in metrics}} for s in r.settings.all]
    return pd.DataFrame(rows, columns=[*r.settings.axes, *metrics])


def _share_explained(table: pd.DataFrame, axis: str, metric: str) -> float:
    """Return how much of the differences an axis explains alone, the adjusted R²; at least 0.

    The adjustment removes what many values explain by chance. An axis of many numbers counts by fifths of them.
    """
    import pandas as pd

    known = table[[axis, metric]].dropna()
    figures, by = known[metric], known[axis]
    if by.nunique() > MOST_COLORS:
        by = pd.qcut(by.astype(float), 5, labels=False, duplicates="drop")
    freedom = len(figures) - by.nunique()
    total = ((figures - figures.mean()) ** 2).sum()
    if freedom < 1 or not total:
        return 0.0
    within = ((figures - figures.groupby(by).transform("mean")) ** 2).sum()
    return max(1 - within / freedom * (len(figures) - 1) / total, 0.0)


def is_numeric(answer: Answer, axis: str) -> bool:
    """Whether every value of the axis is a number."""
    return all(as_number(s.values[axis]) is not None for s in answer.recommendation.settings.all)


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


def setting_text(answer: Answer, setting: Setting) -> str:
    """Return the text over a setting's point: its figures and the interval of its speed."""
    r = answer.recommendation
    head = [*(f"{key}={value}" for key, value in setting.values.items()), numbers(setting.trials)]
    why_not = answer.why_not.get(setting.name)
    lines = _figure_lines(r.settings.medians(setting), r.interval(setting), r.settings.loss_key)
    return _joined([*head, *lines, *([f"does not qualify: {why_not}"] if why_not else [])])


def trial_text(trial: TrialRow, loss_key: str, note: str = "") -> str:
    """Return the text over a trial's point."""
    head = [f"trial {trial.number}", *(f"{key}={value}" for key, value in trial.setting.items())]
    speed = trial.figures.get(SPEED, math.nan)
    lines = _figure_lines(trial.figures, Interval(speed) if math.isfinite(speed) else None, loss_key)
    return _joined([*head, *lines, *([note] if note else [])])


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


def _joined(lines: Sequence[str]) -> str:
    return "<br>".join(html.escape(line) for line in lines)
