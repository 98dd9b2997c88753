"""Which files of a trial are in its folder, and which of them a start removes, sets aside, stores or logs."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class TrialFile:
    """Files of a trial, by a pattern of their names in its folder.

    Attributes:
        pattern: of the names.
        stored_by: who puts them into object storage: the driver, or the ranks that write them; None: nobody.
        artifact: their folder among the artifacts of its run; "": the one that they are in; None: they are none.
        of_attempt: they are set aside when the trial is measured again.
    """

    pattern: str
    stored_by: Literal["driver", "ranks"] | None = None
    artifact: str | None = None
    of_attempt: bool = True

    def find(self, folder: Path) -> list[Path]:
        """Return those in a trial's folder, or the inner folders of those."""
        return sorted(folder.glob(self.pattern.partition("/")[0]))


# In the order in which they are stored; they are removed in the reverse one: a trial with an outcome has the rest.
# Checkpoints are not among them: a trial resumes from them or refuses them.
TRIAL_FILES = (
    TrialFile("places.json"),
    TrialFile("facts.before.json"),
    TrialFile("forecast.json", "driver", of_attempt=False),
    TrialFile("model.pt", "ranks", artifact="model", of_attempt=False),
    TrialFile("model/*", "ranks", artifact="", of_attempt=False),
    TrialFile("logs/rank*.log", "ranks"),
    TrialFile("memory_*_rank*", "ranks", artifact="memory"),
    TrialFile("trace_rank*", "ranks", artifact="trace"),
    TrialFile("failures*/*", "driver", artifact=""),
    TrialFile("facts.json", "driver"),
    TrialFile("metrics.jsonl", "driver", artifact=""),
    TrialFile("progress.json", "driver"),
    TrialFile("error.txt", "driver", artifact=""),
    TrialFile("outcome.json", "driver"),
)


ENDED = ("progress.json", "outcome.json", "error.txt")  # files about how a trial ended, which a resume removes


def contents(folder: Path, patterns: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """Yield the name in the folder of a trial or a sweep, and the content, of each file of these patterns, in order."""
    for pattern in patterns:
        for path in sorted(folder.glob(pattern)):
            with suppress(FileNotFoundError):
                yield str(path.relative_to(folder)), path.read_bytes()


def clear_attempt(folder: Path) -> None:
    """Prepare a trial's folder for a resume: reported results stay, files about earlier processes are removed.

    Its facts are renamed: a resume compares the data with them.
    """
    with suppress(FileNotFoundError):
        (folder / "facts.json").rename(folder / "facts.before.json")
    for name in ENDED:
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
