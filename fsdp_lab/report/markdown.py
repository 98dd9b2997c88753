"""A report as Markdown: the content of the page, in its order, without its pictures."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fsdp_lab.report import tables
from fsdp_lab.report.answer import Answer
from fsdp_lab.report.data import SweepData
from fsdp_lab.report.thin import MOST_ROWS, more_note, shown_trials, store_note, thinned_note


def to_markdown(sweep: SweepData, answer: Answer, uses: Sequence[str] = ()) -> str:
    """Return the report; `uses`: see `page.to_html`."""
    parts = [f"# {_text(tables.heading(sweep, answer))}", f"**{_text(answer.head + answer.sentence)}**"]
    parts += ["\n".join(f"- {_text(line)}" for line in answer.lines)] if answer.lines else []
    parts += [_text(note) for note in answer.notes]
    if answer.command:
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", answer.command)), default=0))
        parts += [answer.to_train.strip().capitalize()] if answer.to_train else []
        parts.append(f"{fence}\n{answer.command}\n{fence}")
    if uses:
        parts.append(f"{tables.TAKE_HOME}: {', '.join(f'[{name}]({name})' for name in uses)}")
    rows = [("command", sweep.command), *tables.about(sweep)]
    parts.append("\n".join(f"- {_text(name)}: {_cell(text)}" for name, text in rows))
    parts += ["## Trials", _trials(sweep, answer)]
    parts += [note for note in (thinned_note(sweep), store_note(sweep)) if note]
    if note := tables.shared_note(sweep, tables.columns_of(sweep, answer)):
        parts.append(note)
    parts.append(_front(answer))
    parts += _what_else(sweep, answer)
    return "\n\n".join(parts) + "\n"


def _trials(sweep: SweepData, answer: Answer) -> str:
    columns = tables.columns_of(sweep, answer)
    best = tables.best_of(sweep, columns)
    rows = []
    for trial in shown_trials(sweep, answer):
        row = [str(trial.number), *(trial.setting.get(axis, "") for axis in sweep.axes), trial.status]
        for column in columns:
            value = trial.figures.get(column.key)
            text = column.text(value)
            if value is not None and tables.is_shared(sweep, trial, column):
                text += f" {tables.SHARED_MARK}"
            row.append(f"**{text}**" if value is not None and value == best[column.key] else text)
        rows.append(row)
    return _table(("trial", *sweep.axes, "status", *(c.label for c in columns)), rows)


def _front(answer: Answer) -> str:
    """Return the Pareto front of the metrics in the main picture."""
    names = ", ".join(f"`{_text(name)}`" for name in answer.front[:MOST_ROWS]) or "none"
    names += f" {more}" if (more := more_note(len(answer.front))) else ""
    return f"Pareto front of {' and '.join(_text(metric) for metric, _ in answer.axes)}: {names}."


def _what_else(sweep: SweepData, answer: Answer) -> list[str]:
    parts = []
    if ended := tables.ended_otherwise(sweep):
        rows = [[str(t.number), t.status, t.error or ""] for t in ended]
        parts += ["## Trials that did not finish", *_cut_table(("trial", "ended", "reason"), rows)]
    parts += [text for text in (tables.stopped_sentence(sweep), tables.forecast_sentence(sweep)) if text]
    heads, effects = tables.effect_rows(sweep)
    if effects:
        parts.append("## Effect of each axis: means over the other axes ± one standard deviation")
        parts += _cut_table(heads, effects, "")
    if rows := [[f"`{name}`", reason] for name, reason in tables.not_qualified(answer)]:
        parts += ["## Settings that do not qualify", *_cut_table(("setting", "why not"), rows)]
    return [*parts, "## How the setting was chosen", "\n".join(f"- {_text(rule)}" for rule in answer.rules)]


def _cut_table(heads: Sequence[str], rows: Sequence[Sequence[str]], where: str = "; report.csv has all") -> list[str]:
    """Return a table of the first rows, and a line with the number of further rows."""
    more = more_note(len(rows), where)
    return [_table(heads, rows[:MOST_ROWS]), *([more] if more else [])]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in row) + " |" for row in lines)


def _cell(text: str) -> str:
    return _text(text).replace("|", "\\|")


def _text(text: str) -> str:
    """Return text on one line, without elements: Markdown passes HTML through."""
    return " ".join(text.split()).replace("<", "&lt;")
