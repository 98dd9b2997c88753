"""The last thirty nights on one page: a line with its band for each setting and metric, and the changes of code."""

from __future__ import annotations

import html
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from fsdp_lab.config.nightly import ToleranceConfig
from fsdp_lab.files import write_text
from fsdp_lab.metrics import SPEED
from fsdp_lab.nightly.gate import Judged, judged_metrics
from fsdp_lab.nightly.nights import ACCEPTED, Night, changes
from fsdp_lab.report.page import chart, page
from fsdp_lab.report.style import COLORS

_MOST_NIGHTS = 30
_MARKS = {ACCEPTED: "diamond"}
_DEFAULT_TOLERANCE = ToleranceConfig()


def write_page(
    path: Path, study: str, nights: Sequence[Night], tolerance: ToleranceConfig = _DEFAULT_TOLERANCE
) -> None:
    """Write the page of the nights that are over.

    Args:
        path: of the HTML file.
        study: its name.
        nights: in order.
        tolerance: no axis shows less than twice the change that is tolerated.
    """
    shown = [night for night in nights if night.over][-_MOST_NIGHTS:]
    charts = [
        (f"metric-{place}", f"{judged.label} by night", figure)
        for place, judged in enumerate(judged_metrics())
        if (figure := _chart(judged, shown, getattr(tolerance, judged.gate.tolerance))) is not None
    ]
    body = [f"<h2>{html.escape(heading)}</h2>{chart(name)}" for name, heading, _ in charts]
    about = (
        f"{len(shown)} nights. A line is the median of a setting's repeats; the band spans their minimum and maximum. "
        "Crosses: regressions; diamonds: accepted by hand; hollow: speed was not judged; dotted lines: a new commit, "
        "library version or machine."
    )
    write_text(path, page(f"{study}, night by night", about, "\n".join([_table(shown), *body]), charts))


def _chart(judged: Judged, nights: Sequence[Night], limit: float) -> Any | None:
    import plotly.graph_objects as go

    key, label, scale = judged.key, judged.label, judged.metric.scale
    settings = list(dict.fromkeys(setting for night in nights for setting in night.results))
    figure = go.Figure()
    for place, setting in enumerate(settings):
        having = [n for n in nights if setting in n.results and n.results[setting].values.get(key)]
        if not having:
            continue
        values = [[v / scale for v in night.results[setting].values[key]] for night in having]
        at = [_time(night) for night in having]
        color, group = COLORS[place % len(COLORS)], {"legendgroup": setting, "hoverinfo": "skip"}
        # an edge and its counterpart, between which Plotly fills
        figure.add_scatter(x=at, y=[min(v) for v in values], mode="lines", line_width=0, showlegend=False, **group)
        figure.add_scatter(
            x=at, y=[max(v) for v in values], mode="lines", line_width=0, fill="tonexty", showlegend=False,
            fillcolor=f"rgba({int(color[1:3], 16)},{int(color[3:5], 16)},{int(color[5:], 16)},0.15)", **group,
        )  # fmt: skip
        bad = [
            any(f["setting"] == setting and f["metric"] == label and f["regression"] for f in n.findings)
            for n in having
        ]
        figure.add_scatter(
            x=at,
            y=[median(v) for v in values],
            mode="lines+markers",
            name=html.escape(setting),
            legendgroup=setting,
            line={"color": color},
            marker={
                "size": [13 if b else 12 if n.accepted else 7 for n, b in zip(having, bad, strict=True)],
                "symbol": [
                    ("x" if b else _MARKS.get(n.verdict, "circle")) + ("-open" if n.busy and key == SPEED else "")
                    for n, b in zip(having, bad, strict=True)
                ],
            },
            customdata=[[n.id, n.verdict, len(v)] for n, v in zip(having, values, strict=True)],
            hovertemplate=html.escape(setting)
            + "<br>night %{customdata[0]}: %{customdata[1]}<br>%{y:,.4~r}, the median of %{customdata[2]}"
            "<extra></extra>",
        )  # fmt: skip
    if not figure.data:
        return None
    for before, night in pairwise(nights):
        if changed := changes(before, night):
            figure.add_vline(
                x=_time(night), line={"dash": "dot", "color": "#888888"},
            )  # fmt: skip
            figure.add_annotation(
                x=_time(night), y=1, yref="paper", yanchor="bottom", showarrow=False, font={"size": 10}, textangle=-30,
                xanchor="left", text=html.escape(", ".join(changed)),
            )  # fmt: skip
    figure.update_layout(
        template="plotly_white", height=440, margin={"l": 70, "r": 20, "t": 70, "b": 90}, yaxis_title=label,
        legend={"orientation": "h", "y": -0.15}, hoverlabel={"align": "left"},
    )  # fmt: skip
    figure.update_yaxes(range=_range([y for trace in figure.data for y in trace.y], limit, judged.as_ratio))
    return figure


def _range(shown: Sequence[float], limit: float, as_ratio: bool) -> list[float] | None:
    """Return the range of an axis whose values differ by less than the tolerance, so that noise does not fill it.

    Else None.
    """
    low, high = min(shown), max(shown)
    middle = (low + high) / 2
    band = limit * (abs(middle) if as_ratio else 1)
    return [middle - band, middle + band] if high - low < 2 * band else None


def _time(night: Night) -> str:
    return datetime.fromtimestamp(night.begun, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _table(nights: Sequence[Night]) -> str:
    rows = []
    for place, night in reversed(list(enumerate(nights))):
        moved = [f"{f['setting']}: {f['metric']} {f['change']}" for f in night.findings if f["regression"]]
        moved += [f"other processes used {night.others:.0%} of the cores: speed not judged"] if night.busy else []
        reason = [f"accepted: {night.accepted['reason']}"] if night.accepted else []
        what = "; ".join([*reason, *moved])
        changed = ", ".join(changes(nights[place - 1], night)) if place else ""
        cells = (night.id, night.verdict, night.commit[:10], changed, what)
        *first, last = (html.escape(cell) for cell in cells)
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in first) + f'<td class="long">{last}</td></tr>')
    heads = "".join(
        f"<th>{head}</th>" for head in ("night (UTC)", "verdict", "commit", "changed", "regressions, or why accepted")
    )
    body = "".join(rows)
    return f'<h2>Nights</h2><div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'
