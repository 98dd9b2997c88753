"""The files of a report: one HTML page, and the same as Markdown and as CSV."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from fsdp_lab.files import write_text
from fsdp_lab.report.answer import Answer, answer
from fsdp_lab.report.data import SweepData
from fsdp_lab.report.markdown import to_markdown
from fsdp_lab.report.page import to_html
from fsdp_lab.report.uses import write_uses

FILES = ("report.html", "report.md", "report.csv")


def write_report(sweep: SweepData, folder: Path) -> Answer:
    """Write `report.html`, `report.md` and `report.csv`, and the recommended setting for other programs (`USE_FILES`).

    Each file is written under a temporary name first.

    Args:
        sweep: to report on.
        folder: an existing one.

    Raises:
        OSError: the folder cannot be written.
    """
    recommendation = answer(sweep)
    uses = write_uses(recommendation, folder)
    contents = (
        to_html(sweep, recommendation, uses),
        to_markdown(sweep, recommendation, uses),
        to_csv(sweep, recommendation),
    )
    for name, content in zip(FILES, contents, strict=True):
        write_text(folder / name, content, parents=False)
    return recommendation


def to_csv(sweep: SweepData, recommendation: Answer) -> str:
    """Return a row for each trial with the latest of every figure, in bytes, seconds and samples/s."""
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
                    recommendation.basis if setting is recommendation.setting else "",
                    "yes" if setting.name in recommendation.front else "",
                    recommendation.why_not.get(setting.name, ""),
                    trial.error or "",
                    trial.run_id,
                    "" if trial.seconds is None else round(trial.seconds, 2),
                    *(trial.figures.get(key, "") for key in keys),
                ]
            )
    return out.getvalue()
