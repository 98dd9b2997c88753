"""Which files of a trial are in its folder, and which of them a start removes, stores or logs."""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TrialFile:
    """Files of a trial, by a pattern of their names in its folder.

    Attributes:
        pattern: of the names.
        of_ranks: ranks write them, and put them into object storage if the sweep has any.
        artifact: their folder among the artifacts of its run; "": the one that they are in; None: they are none.
    """

    pattern: str
    of_ranks: bool = False
    artifact: str | None = None

    def find(self, folder: Path) -> list[Path]:
        """Return those in a trial's folder, or the inner folders of those."""
        return sorted(folder.glob(self.pattern.partition("/")[0]))


# They are removed in the reverse order: a trial with an outcome has the rest.
# Checkpoints are not among them: a trial resumes from them or refuses them.
TRIAL_FILES = (
    TrialFile("places.json"),
    TrialFile("facts.before.json"),
    TrialFile("forecast.json"),
    TrialFile("model.pt", of_ranks=True, artifact="model"),
    TrialFile("model/*", of_ranks=True, artifact=""),
    TrialFile("logs/rank*.log", of_ranks=True),
    TrialFile("logs/stuck.rank*.txt", of_ranks=True),
    TrialFile("memory_*_rank*", of_ranks=True, artifact="memory"),
    TrialFile("trace_rank*", of_ranks=True, artifact="trace"),
    TrialFile("failures*/*", artifact=""),
    TrialFile("facts.json"),
    TrialFile("metrics.jsonl", artifact=""),
    TrialFile("progress.json", of_ranks=True),
    TrialFile("error.txt", artifact=""),
    TrialFile("outcome.json"),
)


_ENDED = ("progress.json", "outcome.json", "error.txt")  # files about how a trial ended, which a resume removes


def clear_attempt(folder: Path) -> None:
    """Prepare a trial's folder for a resume: reported results stay, files about earlier processes are removed.

    Its facts are renamed: a resume compares the data with them.
    """
    with suppress(FileNotFoundError):
        (folder / "facts.json").rename(folder / "facts.before.json")
    for name in _ENDED:
        (folder / name).unlink(missing_ok=True)


def clear_left_over(folder: Path) -> None:
    """Remove the files of an earlier trial in its folder, which would be taken for this one's."""
    for kind in reversed(TRIAL_FILES):
        for path in folder.glob(kind.pattern):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        for path in kind.find(folder):
            with suppress(OSError):  # it holds other files
                path.rmdir()
