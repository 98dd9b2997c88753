"""The files of a report: one HTML page, and the same as Markdown and as CSV."""

from __future__ import annotations

from pathlib import Path

from fsdp_lab.files import write_text
from fsdp_lab.report.answer import Answer
from fsdp_lab.report.data import SweepData
from fsdp_lab.report.page import to_html, to_markdown
from fsdp_lab.report.pytorch import SCRIPT, setting_of
from fsdp_lab.report.reason_texts import reason_text

REPORTS = ("report.html", "report.md", "report.csv")
FILES = (*REPORTS, SCRIPT)


def write_report(sweep: SweepData, folder: Path) -> Answer:
    """Write `report.html`, `report.md` and `report.csv`, and the recommended setting as code.

    Each file is written under a temporary name first.

    Args:
        sweep: to report on.
        folder: an existing one.

    Raises:
        OSError: the folder cannot be written.
    """
    made = sweep.recommendation
    (folder / SCRIPT).unlink(missing_ok=True)
    setting = setting_of(made.trial) if made.trial is not None else None
    if setting is not None:
        write_text(folder / SCRIPT, setting, parents=False)
    contents = to_html(sweep, setting is not None), to_markdown(sweep, setting is not None), to_csv(sweep)
    for name, content in zip(REPORTS, contents, strict=True):
        write_text(folder / name, content, parents=False)
    return made


def to_csv(sweep: SweepData) -> str:
    """Return a row for each trial with the latest of every figure, in bytes, seconds and samples/s."""
    r = sweep.recommendation.recommendation
    settings = [r.settings.of_trial[trial.number] for trial in sweep.trials]
    frame = sweep.frame().assign(
        recommended=["yes" if setting is r.setting else "" for setting in settings],
        pareto=["yes" if setting in r.front else "" for setting in settings],
        why_not=[sweep.recommendation.why_not.get(setting.name, "") for setting in settings],
        error=[reason_text(trial.reason) for trial in sweep.trials],
        seconds=lambda frame: frame["seconds"].round(2),
    )
    metrics = sorted({key for trial in sweep.trials for key in trial.figures})
    columns = [*sweep.axes, "status", "recommended", "pareto", "why_not", "error", "run_id", "seconds", *metrics]
    in_order = frame.loc[[number for setting in r.settings.all for number in setting.trials], columns]
    return in_order.to_csv(index_label="trial", lineterminator="\n")
