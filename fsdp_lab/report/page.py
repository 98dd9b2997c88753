"""A report as one HTML page that needs no network, and as Markdown: the same content in the same order."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fsdp_lab.metrics import FORECAST, MEMORY
from fsdp_lab.report.answer import Answer, title, with_a_line
from fsdp_lab.report.data import SweepData
from fsdp_lab.report.plots import figures
from fsdp_lab.report.reason_texts import reason_text
from fsdp_lab.report.render import environment
from fsdp_lab.report.tables import trials_table
from fsdp_lab.status import TrialStatus


def to_html(sweep: SweepData, answer: Answer, script: bool = False) -> str:
    """Return the page; `script`: its folder has the setting as `use_pytorch.py`."""
    from markupsafe import Markup, escape

    charts = figures(sweep, answer)
    body = environment(True).get_template("body.html.j2").render(charts=charts, **_content(sweep, answer, script))
    about = Markup(" · ").join(escape(text if name in ("sweep", "trials") else f"{name} {text}")
                               for name, text in _about(sweep))  # fmt: skip
    command = Markup("<br><code>{}</code>").format(sweep.command)
    return page(title(sweep, answer.recommendation), about + command, body, [(c.name, c.figure) for c in charts])


def to_markdown(sweep: SweepData, answer: Answer, script: bool = False) -> str:
    """Return the report without its pictures; `script`: see `to_html`."""
    ticks = max(map(len, re.findall("`+", answer.command)), default=0)
    content = _content(sweep, answer, script)
    content["about"] = [("command", sweep.command), *_about(sweep)]
    text = environment(False).get_template("report.md.j2").render(fence="`" * max(3, 1 + ticks), **content)
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


def _content(sweep: SweepData, answer: Answer, script: bool) -> dict[str, Any]:
    failed = [t for t in sweep.trials if t.status.ended and t.status not in (TrialStatus.finished, TrialStatus.stopped)]
    described = {other.setting.name for other in with_a_line(answer.recommendation)}
    return {
        "answer": answer,
        "title": title(sweep, answer.recommendation),
        "script": script,
        "table": trials_table(sweep, answer),
        "front": answer.recommendation.front,
        "failed": failed,
        "reason": reason_text,
        "forecasts": _forecast_sentence(sweep),
        "not_qualified": list(answer.why_not.items()) if answer.why_not.keys() - described else [],
    }


def _about(sweep: SweepData) -> list[tuple[str, str]]:
    counts = ", ".join(f"{sweep.statuses.count(status)} {status}" for status in dict.fromkeys(sweep.statuses))
    return [("sweep", sweep.name), ("trials", counts), *sweep.about]


def _forecast_sentence(sweep: SweepData) -> str:
    """Return a sentence about the errors of peak forecasts; "" without any."""
    errors = {
        trial.number: abs(trial.figures[FORECAST] / trial.figures[MEMORY] - 1)
        for trial in sweep.trials
        if trial.status is TrialStatus.finished and trial.figures.get(FORECAST) and trial.figures.get(MEMORY)
    }
    if not errors:
        return ""
    worst = max(errors, key=errors.__getitem__)
    if errors[worst] == 0:
        trials = f"all {len(errors)} trials that have both" if len(errors) > 1 else "the trial that has both"
        return f"The forecast of the peak equals the measurement, to the byte, in {trials}."
    return f"The forecast of the peak is at most {errors[worst] * 100:.3g} % off, in trial {worst}."


def page(title: str, about: str, body: str, charts: Sequence[tuple[str, Any]]) -> str:
    """Return an HTML page with Plotly in it, which draws each figure in its element when the fold opens.

    Args:
        title: text.
        about: HTML.
        body: HTML.
        charts: `(id, figure)` of each; the body has the element.
    """
    from markupsafe import Markup
    from plotly.io import to_json
    from plotly.offline import get_plotlyjs

    drawn = [(name, Markup(_in_script(to_json(figure)))) for name, figure in charts]
    plotly = Markup(get_plotlyjs() if charts else "")
    template = environment(True).get_template("page.html.j2")
    text: str = template.render(title=title, about=Markup(about), body=Markup(body), charts=drawn, plotly=plotly)
    return text


def _in_script(text: str | None) -> str:
    """Return JSON for a script element, with "<" escaped so that no text can end the element."""
    return (text or "{}").replace("<", "\\u003c")
