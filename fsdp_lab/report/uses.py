"""The recommended setting for other programs: files beside the report."""

from __future__ import annotations

from pathlib import Path

from fsdp_lab.config.errors import UserError
from fsdp_lab.files import write_text
from fsdp_lab.report.answer import Answer
from fsdp_lab.takehome import FILES, write_out

USE_FILES = tuple(FILES.values())


def write_uses(answer: Answer, folder: Path) -> list[str]:
    """Write `USE_FILES` of the recommended trial into the folder, and remove those that cannot be written.

    Returns the names of those that were.

    Raises:
        OSError: the folder cannot be written.
    """
    setup = answer.trial.setup if answer.trial else None
    written = []
    for use, name in FILES.items():
        (folder / name).unlink(missing_ok=True)
        if setup is not None:
            try:
                write_text(folder / name, write_out(use, setup), parents=False)
            except UserError:  # `use=` says why
                continue
            written.append(name)
    return written
