"""A report as Markdown: what the page says, in its order, without its pictures."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fsdp_lab.report import tables
from fsdp_lab.report.answer import Answer
from fsdp_lab.report.data import Sweep


def to_markdown(sweep: Sweep, found: Answer, uses: Sequence[str] = ()) -> str:
    """The report, a paragraph or table after the other; `uses`: as for the page."""
    parts = [f"# {_text(tables.heading(sweep, found))}", f"**{_text(found.head + found.sentence)}**"]
    parts += ["\n".join(f"- {_text(line)}" for line in found.lines)] if found.lines else []
    parts += [_text(note) for note in found.notes]
    if found.command:
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", found.command)), default=0))
        parts.append(f"{fence}\n{found.command}\n{fence}")
    if uses:
        parts.append(f"{tables.TAKE_HOME}: {', '.join(f'[{name}]({name})' for name in uses)}")
    told = [("command", sweep.command), *tables.about(sweep)]
    parts.append("\n".join(f"- {_text(name)}: {_cell(text)}" for name, text in told))
    parts += ["## Trials", _trials(sweep, found)]
    if note := tables.shared_note(sweep, tables.columns_of(sweep, found)):
        parts.append(note)
    parts.append(_front(found))
    parts += _what_else(sweep, found)
    return "\n\n".join(parts) + "\n"


def _trials(sweep: Sweep, found: Answer) -> str:
    columns = tables.columns_of(sweep, found)
    best = tables.best_of(sweep, columns)
    rows = []
    for trial in sweep.trials:
        row = [str(trial.number), *(trial.setting.get(axis, "") for axis in sweep.axes), trial.status]
        for column in columns:
            value = trial.figures.get(column.key)
            text = column.text(value)
            if value is not None and tables.is_shared(sweep, trial, column):
                text += f" {tables.SHARED_MARK}"
            row.append(f"**{text}**" if value is not None and value == best[column.key] else text)
        rows.append(row)
    return _table(("trial", *sweep.axes, "status", *(c.label for c in columns)), rows)


def _front(found: Answer) -> str:
    """The Pareto front of the metrics that the main picture shows."""
    names = ", ".join(f"`{_text(name)}`" for name in found.front) or "none"
    return f"Pareto front of {' and '.join(_text(metric) for metric, _ in found.axes)}: {names}."


def _what_else(sweep: Sweep, found: Answer) -> list[str]:
    parts = []
    if ended := tables.ended_otherwise(sweep):
        rows = [[str(t.number), t.status, t.error or ""] for t in ended]
        parts += ["## Trials that did not finish", _table(("trial", "ended", "reason"), rows)]
    parts += [text for text in (tables.stopped_sentence(sweep), tables.forecast_sentence(sweep)) if text]
    heads, effects = tables.effect_rows(sweep)
    if effects:
        parts.append("## What each axis does alone: means over the other axes ± one standard deviation")
        parts.append(_table(heads, effects))
    if rows := [[f"`{name}`", reason] for name, reason in tables.not_told(sweep, found)]:
        parts += ["## Settings that do not qualify", _table(("setting", "why not"), rows)]
    return [*parts, "## How the setting was chosen", "\n".join(f"- {_text(rule)}" for rule in found.rules)]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in row) + " |" for row in lines)


def _cell(text: str) -> str:
    return _text(text).replace("|", "\\|")


def _text(text: str) -> str:
    """On one line, and without elements: Markdown hands HTML on."""
    return " ".join(text.split()).replace("<", "&lt;")
