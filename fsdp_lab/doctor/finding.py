"""The result of a check, and how it is printed."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

GIB = 2**30
_LEVEL_WIDTH, _SUBJECT_WIDTH = 7, 17


@dataclass(frozen=True)
class Finding:
    """The result of a check, with the remedy for a problem.

    Attributes:
        subject: what was checked.
        observation: the state; of a problem also its consequence.
        remedy: "": nothing to do.
        fails: sweeps fail here until it is repaired.
    """

    subject: str
    observation: str
    remedy: str = ""
    fails: bool = False

    @property
    def level(self) -> str:
        """`wrong`, `note` or `ok`, as the line begins."""
        if self.fails:
            return "wrong"
        return "note" if self.remedy else "ok"


def lines(findings: Sequence[Finding], width: int) -> list[str]:
    """Return the lines for a terminal of this width, without colours."""
    wrapped = []
    indent = " " * (_LEVEL_WIDTH + _SUBJECT_WIDTH)
    for finding in findings:
        head = f"{finding.level:<{_LEVEL_WIDTH}}{finding.subject:<{_SUBJECT_WIDTH}}"
        for first, text in ((head, finding.observation), (f"{indent}-> ", finding.remedy)):
            rest = " " * len(first)
            wrapped += textwrap.wrap(text, width, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)
    return wrapped


def gib(num_bytes: float) -> str:
    """Return bytes as `15.6 GiB`, small numbers in MiB."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.0f} MiB"
