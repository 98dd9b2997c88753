"""The text of a verdict, for the terminal, gate.md and the page of nights.

Its sentences are the macros of `templates/sentences.j2`; everything else passes codes and values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from fsdp_lab.config.metrics import Metric, gated
from fsdp_lab.nightly.gate import STATUS, Finding, Outcome
from fsdp_lab.nightly.nights import Night
from fsdp_lab.report.render import environment
from fsdp_lab.report.terminal import Column, FittingTable


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


def title(night: Night) -> str:
    return say("title", night)


def regressions_line(night: Night) -> str:
    """Return the regressions of a night in a line; "" without any."""
    return "; ".join(f"{r.setting}: {r.metric} {r.change or r.tonight}" for r in map(row, night.regressions))


def markdown(night: Night) -> str:
    text: str = template("gate.md").render(title=title(night), said=say("said", night), rows=_rows(night))
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
