"""The files of a report: one HTML page, the same as Markdown and as CSV."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from fsdp_lab.files import write_text
from fsdp_lab.report.answer import Answer, answer
from fsdp_lab.report.data import Sweep
from fsdp_lab.report.markdown import to_markdown
from fsdp_lab.report.page import to_html
from fsdp_lab.report.uses import write_uses

FILES = ("report.html", "report.md", "report.csv")


def write_report(sweep: Sweep, folder: Path) -> Answer:
    """Write `report.html`, `report.md` and `report.csv` into the folder, each under a temporary name first, and the
    recommended setting for other programs (`USE_FILES`).

    Raises:
        OSError: the folder cannot be written.
    """
    found = answer(sweep)
    uses = write_uses(found, folder)
    contents = (to_html(sweep, found, uses), to_markdown(sweep, found, uses), to_csv(sweep, found))
    for name, content in zip(FILES, contents, strict=True):
        write_text(folder / name, content, parents=False)
    return found


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
                    found.basis if setting is found.setting else "",
                    "yes" if setting.name in found.front else "",
                    found.why_not.get(setting.name, ""),
                    trial.error or "",
                    trial.run_id,
                    "" if trial.seconds is None else round(trial.seconds, 2),
                    *(trial.figures.get(key, "") for key in keys),
                ]
            )
    return out.getvalue()
