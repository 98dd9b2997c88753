"""The text of a verdict, for the terminal, gate.md, the webhook and the page of nights.

Its sentences are macros of `templates/sentences.j2`; all other code passes codes and values.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from fsdp_lab.config.metrics import Metric, gated
from fsdp_lab.config.nightly import ToleranceConfig
from fsdp_lab.config.status import TrialStatus
from fsdp_lab.nightly.gate import STATUS, Finding, Night, Outcome, Verdict, changes
from fsdp_lab.report.page import page
from fsdp_lab.report.plots import COLORS, GREY
from fsdp_lab.report.render import environment
from fsdp_lab.report.terminal import Column, FittingTable

if TYPE_CHECKING:
    import pandas as pd

WEBHOOK = "FSDP_LAB_WEBHOOK"
_WEBHOOK_S = 10.0
_MOST_NIGHTS = 30


class Row(NamedTuple):
    setting: str
    metric: str
    before: str
    tonight: str
    change: str
    verdict: str


def template(name: str) -> Any:
    return environment(name.endswith(".html"), "fsdp_lab.nightly").get_template(name)


def say(macro: str, *values: Any) -> str:
    return str(getattr(template("sentences.j2").module, macro)(*values)).strip()


def row(finding: Finding) -> Row:
    if finding.metric == STATUS:
        tonight, before = (say("ended", statuses) for statuses in finding.ended)
        return Row(finding.setting, "result", before, tonight, "", say("reason", finding, "", "", ""))
    metric = next(metric for metric in gated() if metric.key == finding.metric)
    before, tonight = (metric.text(value) for value in (finding.before, finding.tonight))
    tonight = tonight or ("none" if finding.outcome is Outcome.lost else "")
    tolerance, noise = (_change(metric, change) for change in (finding.tolerance, finding.noise))
    reason = say("reason", finding, tolerance, noise, _change(metric, finding.slope, digits="+.2g"))
    return Row(finding.setting, metric.label, before, tonight, _change(metric, finding.change), reason)


def regressions_line(night: Night) -> str:
    """Return the regressions of a night in one line; "" without any."""
    return "; ".join(f"{r.setting}: {r.metric} {r.change or r.tonight}" for r in map(row, night.regressions))


def markdown(night: Night) -> str:
    text: str = template("gate.md").render(title=say("title", night), said=say("said", night), rows=_rows(night))
    return text.rstrip() + "\n"


def terminal_table(night: Night) -> FittingTable:
    """Return the table for a terminal, regressions first. A setting is named in its first row."""
    rows = _rows(night)
    names = [r.setting for r in rows]
    settings = [name if name != before else "" for before, name in zip(["", *names], names, strict=False)]
    return FittingTable(
        [
            Column("setting", settings, is_text=True, justify="left"),
            Column("metric", [r.metric for r in rows], justify="left"),
            Column("before", [r.before for r in rows]),
            Column("tonight", [r.tonight for r in rows]),
            Column("change", [r.change for r in rows], drop=1),
            Column("verdict", [r.verdict for r in rows], is_text=True, justify="left"),
        ],
        elsewhere="gate.md",
    )


def _rows(night: Night) -> list[Row]:
    return [row(finding) for finding in sorted(night.findings, key=lambda finding: not finding.is_regression)]


def _change(metric: Metric, change: float | None, digits: str = "+.1f") -> str:
    """Return a change of a metric, with its sign."""
    if not change:
        return "" if change is None else "none"
    if metric.gate.kind != "ratio":
        return f"{change / metric.scale:+.3g}"
    text = f"{change * 100:{digits}}"
    return "below 0.1 %" if float(text) == 0 else f"{text} %"


class _NoRedirects(HTTPRedirectHandler):
    """Turns each redirect into an error: urllib would follow it with a GET, without the verdict."""

    def redirect_request(self, *_: Any) -> None:
        return None


def notify(study: str, folder: Path, night: Night) -> str | None:
    """POST the verdict as JSON to the address in the environment, if there is one.

    Returns:
        the problem; None if there was none. It omits the address, because its path or query may be a secret.
    """
    address = os.environ.get(WEBHOOK)
    if not address:
        return None
    content = {
        "text": f"{study}: {say('title', night)}\n{say('said', night)}",
        "study": study,
        "night": night.id,
        "folder": str(folder / night.id),
        "regressions": [asdict(finding) | {"text": " ".join(row(finding))} for finding in night.regressions],
        **{name: getattr(night, name) for name in ("verdict", "baseline", "changed", "origin", "run_id")},
    }
    request = Request(address, json.dumps(content).encode(), {"Content-Type": "application/json"})
    try:
        with build_opener(_NoRedirects).open(request, timeout=_WEBHOOK_S):
            return None
    except Exception as error:  # noqa: BLE001 - no error of a webhook may lose a night
        reason = getattr(error, "code", None) or getattr(error, "reason", None) or type(error).__name__
        host = urlsplit(address).netloc
        return f"{WEBHOOK}: {host} did not accept the verdict ({reason}); gate.md and MLflow have it"


def nights_page(study: str, nights: Sequence[Night], tolerance: ToleranceConfig) -> str:
    """Return the page of the latest nights.

    Args:
        tolerance: each axis shows at least twice the tolerated change.
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
    """Return one row per finished trial of these nights, with the start time of its night."""
    import pandas as pd

    rows = [{**trial, "at": night.begun * 1000, "night": night.id} for night in nights for trial in night.trials]
    frame = pd.DataFrame(rows, columns=["at", "night", "setting", STATUS] if not rows else None)
    return frame[frame[STATUS] == TrialStatus.finished]


def chart(metric: Metric, nights: Sequence[Night], rows: pd.DataFrame, limit: float) -> Any | None:
    """Return None if no night has measured the metric."""
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
    if high - low < 2 * band:  # noise must not fill the chart
        figure.update_yaxes(range=[(low + high) / 2 - band, (low + high) / 2 + band])
    return figure
