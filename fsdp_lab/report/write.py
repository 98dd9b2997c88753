"""A report as one HTML page, as Markdown and as CSV; the page needs no network."""

from __future__ import annotations

import csv
import html
import io
import math
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from fsdp_lab.files import write_text
from fsdp_lab.metrics import MEMORY, SPEED, Metric, declared, table_columns
from fsdp_lab.report.answer import Answer, answer
from fsdp_lab.report.data import Sweep, Trial
from fsdp_lab.report.effects import effects
from fsdp_lab.report.plots import figures
from fsdp_lab.report.uses import write_uses
from fsdp_lab.status import TrialStatus

FILES = ("report.html", "report.md", "report.csv")


def write_report(sweep: Sweep, folder: Path) -> Answer:
    """Write `report.html`, `report.md` and `report.csv` into the folder, each under a temporary name first, and the
    recommended setting for other programs (`USE_FILES`).

    Raises:
        OSError: the folder cannot be written.
    """
    found = answer(sweep)
    contents = (to_html(sweep, found), to_markdown(sweep, found), to_csv(sweep, found))
    for name, content in zip(FILES, contents, strict=True):
        write_text(folder / name, content, parents=False)
    write_uses(found, folder)
    return found


def to_html(sweep: Sweep, found: Answer) -> str:
    charts = figures(sweep, found)
    chosen = found.setting.trials if found.setting else []
    parts = [
        f'<div id="answer" class="{"" if found.setting else "none"}">{_inline(found.sentence)}</div>',
        *(
            [f"<ul id='against'>{''.join(f'<li>{_inline(line)}</li>' for line in found.lines)}</ul>"]
            if found.lines
            else []
        ),
        *(f'<p class="note">{_inline(note)}</p>' for note in found.notes),
        *([f"<pre id='command'>{html.escape(found.command)}</pre>"] if found.command else []),
        f'<p class="small">{"<br>".join(html.escape(rule) for rule in found.rules)}</p>',
    ]
    for name, heading, _ in charts:
        parts.append(f'<h2>{heading}</h2><div id="{name}-chart"></div>')
        if note := _CHART_NOTES.get(name):
            parts.append(f'<p class="small">{note}</p>')
    parts.append("<h2>Trials</h2>")
    parts.append(
        '<input id="filter" type="search" placeholder="filter: sharding=root fp16 …" aria-label="filter trials">'
    )
    parts.append(f' <span id="shown" class="small">{len(sweep.trials)} of {len(sweep.trials)}</span>')
    parts.append(_trial_table(sweep, chosen))
    if found.why_not:
        parts.append("<h2>Settings that do not qualify, and why</h2>")
        parts.append(_plain_table(("setting", "why not"), found.why_not.items()))
    if ended := [t for t in sweep.trials if t.status.ended and t.status is not TrialStatus.finished]:
        parts.append("<h2>What failed, was stopped or was skipped</h2>")
        rows = [(str(t.number), t.name.partition(": ")[2], t.status, t.error or "") for t in ended]
        parts.append(_plain_table(("trial", "setting", "ended", "reason"), rows))
    about = " · ".join(f"{html.escape(name)}: {html.escape(text)}" for name, text in _about(sweep))
    return page(sweep.name, about, "\n".join(parts), charts)


_CHART_NOTES = {
    "memory-speed": "Up and to the left is better. A hover shows the trial; a click opens its run (tracking.ui).",
    "effects": "Points: means over the other axes, of the combinations in which every value has a result. Bars: one "
    "standard deviation of these.",
    "breakdown": "By category at the moment when the largest worker held most.",
}


def page(title: str, about: str, body: str, charts: Sequence[tuple[str, str, object]]) -> str:
    """One HTML page with Plotly in it: each chart goes to the element `<id>-chart` of the body.

    Args:
        title: text. about, body: HTML.
    """
    from plotly.io import to_json
    from plotly.offline import get_plotlyjs

    drawn = "\n".join(
        f'<div id="{name}" class="plotly-graph-div"></div><script>'
        f'document.getElementById("{name}-chart").append(document.getElementById("{name}"));'
        f"{{const figure = {_in_script(to_json(figure))};"
        f'Plotly.newPlot("{name}", figure.data, figure.layout, {{responsive: true, displaylogo: false}});}}</script>'
        for name, _, figure in charts
    )
    template = resources.files("fsdp_lab.report").joinpath("page.html").read_text(encoding="utf-8")
    plotly = get_plotlyjs() if charts else ""
    parts = {"TITLE": html.escape(title), "ABOUT": about, "BODY": body, "CHARTS": drawn, "PLOTLY": plotly}
    # in one pass: a name may be one of these words
    return re.sub(r"@([A-Z]+)@", lambda m: parts.get(m[1], m[0]), template)


def _in_script(text: str | None) -> str:
    """JSON for a script element: "<" stands in texts only, and escaped none of them can end the element."""
    return (text or "{}").replace("<", "\\u003c")


def _about(sweep: Sweep) -> list[tuple[str, str]]:
    statuses = [trial.status for trial in sweep.trials]
    counts = ", ".join(f"{statuses.count(s)} {s}" for s in dict.fromkeys(statuses))
    return [("command", sweep.command), ("trials", counts), *sweep.about]


def _trial_table(sweep: Sweep, chosen: Sequence[Trial]) -> str:
    columns = _columns(sweep)
    best = _best(sweep, columns)
    heads = ("trial", *sweep.axes, "status", *(c.label for c in columns))
    rows = []
    for trial in sweep.trials:
        url = sweep.url(trial)
        number = (
            f'<a href="{html.escape(url)}" target="_blank" rel="noopener">{trial.number}</a>' if url else trial.number
        )
        cells = [f'<td class="number" data-value="{trial.number}">{number}</td>']
        cells += [f"<td>{html.escape(trial.setting.get(axis, ''))}</td>" for axis in sweep.axes]
        cells.append(f"<td>{html.escape(trial.status)}</td>")
        for column in columns:
            value = trial.figures.get(column.key)
            text = column.text(value)
            css = "number best" if value is not None and value == best[column.key] else "number"
            cells.append(f'<td class="{css}" data-value="{"" if value is None else value}">{text}</td>')
        words = html.escape(f"{trial.name} {trial.status}".lower())
        css = ' class="chosen"' if trial in chosen else ""
        rows.append(f'<tr{css} data-words="{words}">{"".join(cells)}</tr>')
    head = "".join(f'<th><button type="button">{html.escape(name)}</button></th>' for name in heads)
    return (
        f'<div class="wide"><table class="sortable"><thead><tr>{head}</tr></thead><tbody>'
        f"{''.join(rows)}</tbody></table></div>"
    )


def _plain_table(heads: Sequence[str], rows: object) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in heads)
    body = ""
    for row in rows:  # type: ignore[attr-defined]
        *cells, last = (html.escape(str(cell)) for cell in row)
        body += "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + f'<td class="long">{last}</td></tr>'
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def to_markdown(sweep: Sweep, found: Answer) -> str:
    """What the page says, without its pictures."""
    columns = _columns(sweep)
    best = _best(sweep, columns)
    out = io.StringIO()

    def line(text: str = "") -> None:
        out.write(text + "\n")

    line(f"# {_text(sweep.name)}\n")
    line(f"**{_text(found.sentence)}**\n")
    for text in found.lines:
        line(f"- {_text(text)}")
    for text in found.notes:
        line(f"\n{_text(text)}")
    if found.lines or found.notes:
        line()
    if found.command:
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", found.command)), default=0))
        line(f"{fence}\n{found.command}\n{fence}\n")
    for rule in found.rules:
        line(f"- {_text(rule)}")
    line()
    for name, text in _about(sweep):
        line(f"- {_text(name)}: {_cell(text)}")
    line("\n## Trials\n")
    rows = []
    for trial in sweep.trials:
        row = [str(trial.number), *(trial.setting.get(axis, "") for axis in sweep.axes), trial.status]
        for column in columns:
            value = trial.figures.get(column.key)
            text = column.text(value)
            row.append(f"**{text}**" if value is not None and value == best[column.key] else text)
        rows.append(row)
    line(_markdown_table(("trial", *sweep.axes, "status", *(c.label for c in columns)), rows))
    front = ", ".join(f"`{_text(name)}`" for name in found.front) or "none"
    line(f"Pareto front of peak memory and samples/s: {front}.\n")
    if len(sweep.settings) > 1:
        line("## What each axis does alone: means over the other axes ± one standard deviation\n")
        heads = ("axis", "value", "settings", *(declared(key).label for key in (SPEED, MEMORY, sweep.loss_key)))
        line(_markdown_table(heads, _effect_rows(sweep)))
    if found.why_not:
        line("## Settings that do not qualify\n")
        line(_markdown_table(("setting", "why not"), [[f"`{name}`", why] for name, why in found.why_not.items()]))
    if ended := [t for t in sweep.trials if t.status.ended and t.status is not TrialStatus.finished]:
        line("## What failed, was stopped or was skipped\n")
        line(_markdown_table(("trial", "ended", "reason"), [[str(t.number), t.status, t.error or ""] for t in ended]))
    return out.getvalue()


def _effect_rows(sweep: Sweep) -> list[list[str]]:
    rows = []
    metrics = [declared(key) for key in (SPEED, MEMORY, sweep.loss_key)]
    for axis in sweep.setting_axes:
        by_metric = [{effect.value: effect for effect in effects(sweep, axis, metric.key)} for metric in metrics]
        for value in dict.fromkeys(value for found in by_metric for value in found):
            counts = [str(found[value].count) for found in by_metric if value in found]
            row = [axis, value, counts[0]]
            for found, metric in zip(by_metric, metrics, strict=True):
                effect = found.get(value)
                spread = f" ± {metric.text(effect.spread)}" if effect and effect.count > 1 else ""
                row.append(metric.text(effect.mean) + spread if effect else "")
            rows.append(row)
    return rows


def to_csv(sweep: Sweep, found: Answer) -> str:
    """A row a trial with the latest of every figure, in bytes, seconds and samples/s."""
    keys = sorted({key for trial in sweep.trials for key in trial.figures})
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    rows.writerow(
        ["trial", *sweep.axes, "status", "recommended", "pareto", "why_not", "error", "run_id", "seconds", *keys]
    )
    for setting in sweep.settings:
        for trial in setting.trials:
            rows.writerow(
                [
                    trial.number,
                    *(trial.setting.get(axis, "") for axis in sweep.axes),
                    trial.status,
                    "yes" if setting is found.setting else "",
                    "yes" if setting.name in found.front else "",
                    found.why_not.get(setting.name, ""),
                    trial.error or "",
                    trial.run_id,
                    "" if trial.seconds is None else round(trial.seconds, 2),
                    *(trial.figures.get(key, "") for key in keys),
                ]
            )
    return out.getvalue()


def _columns(sweep: Sweep) -> list[Metric]:
    return [c for c in table_columns("report") if any(c.key in trial.figures for trial in sweep.trials)]


def _best(sweep: Sweep, columns: Sequence[Metric]) -> dict[str, float | None]:
    """Metric -> the best value of a finished trial; None where none is better, or all are the same."""
    finished = [trial.figures for trial in sweep.trials if trial.status is TrialStatus.finished]
    return {c.key: c.best_of([f[c.key] for f in finished if math.isfinite(f.get(c.key, math.nan))]) for c in columns}


def _markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join("| " + " | ".join(_cell(cell) for cell in row) + " |\n" for row in lines)


def _cell(text: str) -> str:
    return _text(text).replace("|", "\\|")


def _text(text: str) -> str:
    """On one line, and without elements: Markdown hands HTML on."""
    return " ".join(text.split()).replace("<", "&lt;")


def _inline(text: str) -> str:
    """Text with `code` as HTML."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))
