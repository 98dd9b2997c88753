"""The files of a report: one HTML page, and the recommended setting as code."""

from __future__ import annotations

from pathlib import Path

from fsdp_lab.report.answer import Answer
from fsdp_lab.report.data import SweepData
from fsdp_lab.report.page import to_html
from fsdp_lab.report.pytorch import SCRIPT, setting_of
from fsdp_lab.storage.files import write_text

_REPORT = "report.html"
FILES = (_REPORT, SCRIPT)


def write_report(sweep: SweepData, folder: Path) -> Answer:
    """Write `report.html`, and the recommended setting as code.

    Each file is written under a temporary name first.

    Args:
        folder: an existing one.

    Raises:
        OSError: the folder cannot be written.
    """
    made = sweep.recommendation
    (folder / SCRIPT).unlink(missing_ok=True)
    setting = setting_of(made.trial) if made.trial is not None else None
    if setting is not None:
        write_text(folder / SCRIPT, setting, parents=False)
    write_text(folder / _REPORT, to_html(sweep, setting is not None), parents=False)
    return made
