"""The files of a report: one HTML page that needs no network, and the recommended setting as code."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_lab.config.metrics import FORECAST, MEMORY, table_columns
from fsdp_lab.config.status import TrialStatus
from fsdp_lab.record.sweep import SweepRecord
from fsdp_lab.report.answer import Answer, answer, with_a_line
from fsdp_lab.report.plots import MOST, figures, shown_trials, url_of
from fsdp_lab.report.pytorch import SCRIPT, setting_of
from fsdp_lab.report.recommend import Recommendation
from fsdp_lab.report.render import environment, reason_text
from fsdp_lab.report.settings import column
from fsdp_lab.storage.files import write_text

if TYPE_CHECKING:
    import pandas as pd


_REPORT = "report.html"
FILES = (_REPORT, SCRIPT)


def write_report(sweep: SweepRecord, folder: Path) -> Answer:
    """Write `report.html`, and the recommended setting as code.

    Each file is written under a temporary name first.

    Args:
        folder: an existing one.

    Raises:
        OSError: the folder cannot be written.
    """
    made = answer(sweep)
    (folder / SCRIPT).unlink(missing_ok=True)
    setting = setting_of(made.trial) if made.trial is not None else None
    if setting is not None:
        write_text(folder / SCRIPT, setting, parents=False)
    write_text(folder / _REPORT, to_html(sweep, made, setting is not None), parents=False)
    return made


def to_html(sweep: SweepRecord, answer: Answer, script: bool = False) -> str:
    """Return the page; `script`: its folder has the setting as `use_pytorch.py`."""
    charts = figures(sweep, answer)
    kept = (TrialStatus.finished, TrialStatus.stopped)
    described = {other.setting.name for other in with_a_line(answer.recommendation)}
    return _with_plotly(
        "report.html.j2",
        {chart.name: chart.figure for chart in charts},
        charts=charts,
        sweep=sweep,
        answer=answer,
        script=script,
        table=_trials_table(sweep, answer.recommendation),
        most=MOST,
        failed=[trial for trial in sweep.trials if trial.status.ended and trial.status not in kept],
        reason=reason_text,
        forecast_errors=_forecast_errors(sweep.frame()),
        not_qualified=answer.why_not if answer.why_not.keys() - described else {},
    )


def _forecast_errors(frame: pd.DataFrame) -> pd.Series[float]:
    """Return by how much the forecast of the peak was off, as a ratio, for each finished trial that has both."""
    finished = frame[frame["status"] == TrialStatus.finished]
    return (column(finished, FORECAST) / column(finished, MEMORY) - 1).abs().replace(math.inf, math.nan).dropna()


def _trials_table(sweep: SweepRecord, r: Recommendation) -> dict[str, Any]:
    """Return the columns of the table of trials with the best value of each, and its trials, for the templates.

    The figures that decided come first: a phone shows only a few columns.
    """
    frame = sweep.frame()
    decided = [metric for metric, _ in r.axes]
    columns = sorted((c for c in table_columns("report", frame) if c.key in frame), key=lambda c: c.key not in decided)
    finished = frame[frame["status"] == TrialStatus.finished]
    best = {c.key: c.best_of(list(finished[c.key].replace(math.inf, math.nan).dropna())) for c in columns}
    return {
        "columns": columns,
        "best": best,
        "url": partial(url_of, sweep),
        "trials": shown_trials(sweep, r),
    }


def page(title: str, about: str, body: str, charts: Iterable[tuple[str, Any]]) -> str:
    """Return an HTML page that includes Plotly and draws each figure when its fold opens.

    Args:
        title: text.
        about: HTML.
        body: HTML.
        charts: `(id, figure)` of each; the body has an element with this id.
    """
    from markupsafe import Markup

    return _with_plotly("page.html.j2", dict(charts), title=title, about=Markup(about), body=Markup(body))


def _with_plotly(template: str, drawn: dict[str, Any], **values: Any) -> str:
    from markupsafe import Markup
    from plotly.io import to_json
    from plotly.offline import get_plotlyjs

    # Plotly escapes "<", so that no text can end the script element
    scripts = {name: Markup(to_json(figure) or "{}") for name, figure in drawn.items()}
    plotly = Markup(get_plotlyjs() if drawn else "")
    text: str = environment(True).get_template(template).render(scripts=scripts, plotly=plotly, **values)
    return text
