"""The lines of a check: what was expected, what was measured, the verdict; their state file, table and exit status.

Knows nothing of Ray, PyTorch or sweeps. A check that runs out of time keeps its lines in the state file, and the next
call measures only what is left.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path

from fsdp_lab.files import write_text
from fsdp_lab.record.trial_files import append_line


class Verdict(StrEnum):
    passed = "pass"
    failed = "FAIL"
    not_measured = "not measured"


@dataclass(frozen=True)
class Line:
    """One thing that is checked. `seconds`: of the measurement that this line comes from."""

    name: str
    expected: str
    measured: str = ""
    verdict: Verdict = Verdict.not_measured
    seconds: float | None = None

    def judged(self, measured: str, holds: bool) -> Line:
        return replace(self, measured=measured, verdict=Verdict.passed if holds else Verdict.failed)


class State:
    """Lines that were measured, in a file with one JSON object per line. Only those with the same key count.

    Args:
        key: what the measurements depend on: device, driver, versions, sources.
    """

    def __init__(self, path: Path, key: Mapping[str, str]) -> None:
        self.path, self.key = path, dict(key)

    def read(self) -> dict[str, Line]:
        """The latest of each name. A line cut short by a kill is skipped."""
        by_name = {}
        for text in self.path.read_text().splitlines() if self.path.exists() else []:
            try:
                content = json.loads(text)
            except json.JSONDecodeError:
                continue
            if content["key"] == self.key:
                line = content["line"]
                by_name[line["name"]] = Line(**{**line, "verdict": Verdict(line["verdict"])})
        return by_name

    def add(self, line: Line) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        append_line(self.path, json.dumps({"key": self.key, "line": asdict(line)}))

    def forget(self, names: Collection[str]) -> None:
        """Measure these again."""
        kept = [line for name, line in self.read().items() if name not in names]
        self.path.unlink(missing_ok=True)
        for line in kept:
            self.add(line)


def table(about: str, lines: Iterable[Line]) -> str:
    """A Markdown table below a line that says where it was measured."""
    rows = [("check", "expected", "measured", "verdict", "s")]
    rows += [("---",) * 5]
    for line in lines:
        verdict = f"**{line.verdict}**" if line.verdict is Verdict.failed else str(line.verdict)
        seconds = "" if line.seconds is None else f"{line.seconds:.0f}"
        rows.append((line.name, line.expected, line.measured, verdict, seconds))
    text = ["| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in rows]
    return "\n".join([about, "", *text]) + "\n"


def write_table(path: Path, about: str, lines: Iterable[Line]) -> str:
    """Write the table to a file, whole; returns it."""
    text = table(about, lines)
    write_text(path, text)
    return text


def exit_status(lines: Sequence[Line]) -> int:
    """0: all passed. 1: one failed. 3: none failed, but not all were measured."""
    verdicts = {line.verdict for line in lines}
    if Verdict.failed in verdicts:
        return 1
    return 3 if Verdict.not_measured in verdicts else 0
