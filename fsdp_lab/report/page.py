"""A report as one HTML page that needs no network: the answer, its picture and the trials; the rest is folded."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Any

from fsdp_lab.report import tables
from fsdp_lab.report.answer import Answer
from fsdp_lab.report.data import SweepData, TrialRow
from fsdp_lab.report.main_plot import main_plot
from fsdp_lab.report.plots import figures
from fsdp_lab.report.thin import (
    MOST,
    MOST_BARS,
    MOST_LINES,
    MOST_ROWS,
    more_note,
    shown_trials,
    store_note,
    thinned_note,
)

_NOTES = {
    "effects": "Points: means over the other axes, of the combinations in which every value has a result. Bars: one "
    "standard deviation.",
    "breakdown": "Memory by category at the peak of the largest worker.",
}


def to_html(sweep: SweepData, answer: Answer, uses: Sequence[str] = ()) -> str:
    """Return the page; `uses`: names of the files beside it with the setting for other programs."""
    charts = figures(sweep, answer)
    headings = {name: heading for name, heading, _ in charts}
    parts = [_answer(answer), *_take_home(uses)]
    if "main" in headings and (plot := main_plot(sweep, answer)):
        parts.append(f"<h2>{plot.heading}</h2>{chart('main')}<p class='small'>{plot.note}</p>")
    parts.append(_trials(sweep, answer))
    parts += _what_else(sweep, answer)
    for name in [name for name in headings if name != "main"]:
        cut = thinned_note(sweep, _MOST[name]) if name in _MOST else ""
        caption = " ".join(text for text in (_NOTES.get(name, ""), cut) if text)
        note = f"<p class='small'>{caption}</p>" if caption else ""
        is_off = name == "forecast" and tables.worst_forecast(sweep)[0] > _FORECAST_IS_OFF
        parts.append(f"<h2>{headings[name]}</h2>{chart(name)}" if is_off else _fold(headings[name], chart(name) + note))
    if answer.setting and (rows := tables.not_qualified(answer)):
        parts.append(_fold("Settings that do not qualify", _cut_table(("setting", "why not"), rows)))
    rules = "".join(f"<li>{_inline(rule)}</li>" for rule in answer.rules)
    parts.append(_fold("How the setting was chosen", f"<ul class='small'>{rules}</ul>"))
    about = " · ".join(html.escape(text if name in _BARE else f"{name} {text}") for name, text in tables.about(sweep))
    about += f"<br><code>{html.escape(sweep.command)}</code>"
    return page(tables.heading(sweep, answer), about, "\n".join(parts), charts)


_MOST = {"forecast": MOST, "parallel": MOST_LINES, "losses": MOST_LINES, "breakdown": MOST_BARS}
_BARE = ("sweep", "trials")  # what these are shows by itself
_MOST_LINES = 8  # of what other values cost; more are folded
_FORECAST_IS_OFF = 0.01  # a ratio, from which on the forecasts are not folded


def _answer(answer: Answer) -> str:
    """Return the sentence, the costs of other values, the notes and the command."""
    parts = [
        f'<div id="answer"{"" if answer.setting else " class=none"}>{_inline(answer.head + answer.sentence)}</div>'
    ]
    lines = [f"<li>{_inline(line)}</li>" for line in answer.lines]
    if lines:
        parts.append(f'<ul id="against">{"".join(lines[:_MOST_LINES])}</ul>')
    if more := lines[_MOST_LINES:]:
        parts.append(_fold(f"{len(more)} more", f"<ul>{''.join(more)}</ul>"))
    parts += [f'<p class="note">{_inline(note)}</p>' for note in answer.notes]
    if answer.command:
        parts += [f'<p class="small">{answer.to_train.strip().capitalize()}</p>'] if answer.to_train else []
        parts.append(f'<pre id="command">{html.escape(answer.command)}</pre>')
    return "\n".join(parts)


def _take_home(uses: Sequence[str]) -> list[str]:
    """Return links to the setting for other programs."""
    links = ", ".join(f'<a href="{name}">{name}</a>' for name in map(html.escape, uses))
    return [f'<p id="uses" class="small">{tables.TAKE_HOME}: {links}</p>'] if uses else []


def _what_else(sweep: SweepData, answer: Answer) -> list[str]:
    """Return the parts after the answer that have content: failures, stopped trials, and the quality of forecasts."""
    parts = []
    if not answer.setting and answer.why_not:
        rows = list(answer.why_not.items())
        parts.append("<h2>Why no setting qualifies</h2>" + _cut_table(("setting", "why not"), rows))
    if ended := tables.ended_otherwise(sweep):
        others = [(str(t.number), t.name.partition(": ")[2], t.status, t.error or "") for t in ended]
        parts.append("<h2>Trials that did not finish</h2>")
        parts.append(_cut_table(("trial", "setting", "ended", "reason"), others))
    sentences = [text for text in (tables.stopped_sentence(sweep), tables.forecast_sentence(sweep)) if text]
    if sentences:
        parts.append(f'<p id="also">{" ".join(html.escape(text) for text in sentences)}</p>')
    return parts


def _fold(heading: str, content: str) -> str:
    return f"<details><summary>{heading}</summary>{content}</details>"


def chart(name: str) -> str:
    """Return the element in which the page draws a figure."""
    return f'<div id="{name}" class="plotly-graph-div"></div>'


def page(title: str, about: str, body: str, charts: Sequence[tuple[str, str, Any]]) -> str:
    """Return an HTML page with Plotly in it, which draws each figure in the body's `chart(<id>)` when its fold opens.

    Args:
        title: text.
        about: HTML.
        body: HTML.
        charts: `(id, heading, figure)` of each.
    """
    from plotly.io import to_json
    from plotly.offline import get_plotlyjs

    drawn = "\n".join(
        f'<script>(window.figures ??= {{}})["{name}"] = {_in_script(to_json(figure))};</script>'
        for name, _, figure in charts
    )
    template = resources.files("fsdp_lab.report").joinpath("page.html").read_text(encoding="utf-8")
    plotly = get_plotlyjs() if charts else ""
    parts = {"TITLE": html.escape(title), "ABOUT": about, "BODY": body, "CHARTS": drawn, "PLOTLY": plotly}
    # in one pass: a name may be one of these words
    return re.sub(r"@([A-Z]+)@", lambda m: parts.get(m[1], m[0]), template)


def _in_script(text: str | None) -> str:
    """Return JSON for a script element, with "<" escaped so that no text can end the element."""
    return (text or "{}").replace("<", "\\u003c")


def _trials(sweep: SweepData, answer: Answer) -> str:
    columns = tables.columns_of(sweep, answer)
    best = tables.best_of(sweep, columns)
    chosen = answer.setting.trials if answer.setting else []
    heads = ("trial", *sweep.axes, "status", *(c.label for c in columns))
    # long names may break
    names = [html.escape(name).replace("_", "_<wbr>") for name in heads]
    head = "".join(f'<th><button type="button">{name}</button></th>' for name in names)
    rows = []
    for trial in shown_trials(sweep, answer):
        cells = _first_cells(sweep, trial)
        for column in columns:
            value = trial.figures.get(column.key)
            css = "number best" if value is not None and value == best[column.key] else "number"
            css += " shared" if value is not None and tables.is_shared(sweep, trial, column) else ""
            data = "" if value is None else value
            cells.append(f'<td class="{css}" data-value="{data}">{column.text(value)}</td>')
        words = html.escape(f"{trial.name} {trial.status}".lower())
        css = ' class="chosen"' if trial in chosen else ""
        rows.append(f'<tr{css} data-words="{words}">{"".join(cells)}</tr>')
    notes = [note for note in (thinned_note(sweep), store_note(sweep), tables.shared_note(sweep, columns)) if note]
    return (
        '<h2>Trials <input id="filter" type="search" placeholder="filter: sharding=root fp16 …" '
        f'aria-label="filter trials"> <span id="shown" class="small">{len(rows)} of {len(rows)}</span></h2>'
        f'<div class="wide"><table class="sortable"><thead><tr>{head}</tr></thead><tbody>'
        f"{''.join(rows)}</tbody></table></div>" + "".join(f'<p class="small">{html.escape(n)}</p>' for n in notes)
    )


def _first_cells(sweep: SweepData, trial: TrialRow) -> list[str]:
    """Return the cells of a trial before its figures."""
    url = html.escape(sweep.url(trial))
    number = f'<a href="{url}" target="_blank" rel="noopener">{trial.number}</a>' if url else str(trial.number)
    cells = [f'<td class="number" data-value="{trial.number}">{number}</td>']
    cells += [f"<td>{html.escape(trial.setting.get(axis, ''))}</td>" for axis in sweep.axes]
    return [*cells, f"<td>{html.escape(trial.status)}</td>"]


def _cut_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a plain table of the first rows, and below it the number of further rows."""
    more = more_note(len(rows))
    return _plain_table(heads, rows[:MOST_ROWS]) + (f'<p class="small">{more}</p>' if more else "")


def _plain_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in heads)
    body = ""
    for row in rows:
        *cells, last = (html.escape(str(cell)) for cell in row)
        body += "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + f'<td class="long">{last}</td></tr>'
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _inline(text: str) -> str:
    """Return text with `code` as HTML."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))
