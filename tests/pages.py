"""The commands on the pages, as a reader types them, and what a page shows of their output."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.conftest import ROOT

# Every page of the site and of the repository.
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "deploy/README.md", "benchmarks/README.md", "docs/*.md",
         "docs/reference/*.md", "experiments/*/README.md")  # fmt: skip
# The programs that a command begins with, after the variables that it sets.
_PROGRAM = re.compile(
    r"([A-Z_]+=\S+ )*(\S*python3?|make|torchrun|pytest|fsdp-lab|eval|ray|kubectl|docker|sbatch|squeue|scancel|mlflow|hf"
    r"|pip|git|sudo|mkdir|systemctl|\(?s?crontab|\.ci/\w+) "
)
_FENCE = re.compile(r"((?:^<!-- not run by a test[^\n]*-->\n)*)^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"<!-- not run by a test(?:, `([^`]+)`)?: ([^\n]+) -->")


@dataclass(frozen=True)
class Command:
    """A command in a block of a page.

    Attributes:
        page: its file, seen from the root of the repository.
        line: where its block begins.
        text: in one line, without a prompt or a comment.
        reason: why no test runs it, by the mark before its block; "" without a mark.
        output: the lines that the page shows of its output.
    """

    page: str
    line: int
    text: str
    reason: str
    output: str

    @property
    def place(self) -> str:
        """Return page, line and command, for a message."""
        return f"{self.page}:{self.line}: {self.text}"

    @property
    def words(self) -> list[str]:
        """Return the words of the command, as a shell reads them."""
        return shlex.split(self.text)


@dataclass(frozen=True)
class Mark:
    """`<!-- not run by a test: reason -->` before a block, for all its commands; or, after a comma, for one of them.

    Attributes:
        named: how the command begins that it is for; "" for a whole block.
    """

    named: str
    reason: str

    def is_for(self, command: str) -> bool:
        """Return whether a command of the block has this mark."""
        return command.startswith(self.named)


def lay_project(folder: Path) -> None:
    """Write the files of docs/your-model.md where their first lines say: a project with a model, and its options."""
    for language, block in re.findall(r"```(\w+)\n(.*?)```", (ROOT / "docs" / "your-model.md").read_text(), re.DOTALL):
        if language in ("python", "yaml"):
            name = next(line for line in block.splitlines() if not line.startswith("# @")).removeprefix("# ")
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block)


def all_pages() -> list[str]:
    """Return the files of all pages, seen from the root of the repository."""
    return sorted(file.relative_to(ROOT).as_posix() for pattern in PAGES for file in ROOT.glob(pattern))


@cache
def all_commands() -> tuple[Command, ...]:
    """Return every command on every page, in the order of the pages."""
    return tuple(command for page in all_pages() for command in _commands_of(page))


def marks() -> Iterator[tuple[str, int, Mark, list[str]]]:
    """Give each mark with its page, its line and the commands of its block."""
    for page in all_pages():
        text = (ROOT / page).read_text()
        for found in _FENCE.finditer(text):
            commands = [command for command, _ in read_block(found[3])]
            for mark in _marks_in(found[1]):
                yield page, text[: found.start()].count("\n") + 1, mark, commands


def is_in(shown: str, printed: str, *, numbers: bool = True) -> bool:
    """Return whether a command printed what a page shows of its output.

    A line `...` on the page stands for any lines, `...` within a line for any characters.

    Args:
        shown: the lines on the page.
        printed: what the command printed.
        numbers: whether figures have to be the same; if not, spaces and rules may differ in length, too.
    """

    def pattern(line: str) -> str:
        if line == "...":
            return r"(?:.*\n)*?"
        escaped = re.escape(line.rstrip()).replace(r"\.\.\.", ".*")
        if not numbers:
            escaped = re.sub(r"\d+(?:(?:\\\.|,)\d+)*", lambda _: r"\d[\d.,]*", escaped)
            escaped = re.sub(r"(?:\\ )+", lambda _: r" +", re.sub("─+", "─+", escaped))
        return rf"{escaped} *\n"

    return re.search("^" + "".join(map(pattern, shown.splitlines())), printed, re.MULTILINE) is not None


def read_block(block: str) -> list[tuple[str, str]]:
    """Return the commands of a block, each with the lines that follow it in a block with prompts."""
    lines = re.sub(r" *\\\n *", " ", block).splitlines()
    prompted = any(line.startswith("$ ") for line in lines)
    found: list[tuple[str, str]] = []
    for line in lines:
        typed = re.split(r" +# | {3,}", line.removeprefix("$ "))[0].strip()
        if line.startswith("$ ") if prompted else _PROGRAM.match(f"{typed} ") and not line.startswith(" "):
            found.append((typed, ""))
        elif prompted and found:
            found[-1] = (found[-1][0], found[-1][1] + line + "\n")
    return found


def _commands_of(page: str) -> Iterator[Command]:
    text = (ROOT / page).read_text()
    blocks = list(_FENCE.finditer(text))
    for at, found in enumerate(blocks):
        if found[2] not in ("", "sh"):
            continue
        given = _marks_in(found[1])
        commands = read_block(found[3])
        for typed, output in commands:
            reason = next((mark.reason for mark in given if mark.is_for(typed)), "")
            shown = output or (_shown_below(text, found, blocks[at + 1 : at + 2]) if len(commands) == 1 else "")
            yield Command(page, text[: found.start(2)].count("\n") + 1, typed, reason, shown)


def _shown_below(text: str, block: re.Match[str], following: list[re.Match[str]]) -> str:
    """Return the next block, if it is one of output in the same section; else ""."""
    if not following or following[0][2] != "text" or "\n#" in text[block.end() : following[0].start()]:
        return ""
    return following[0][3]


def _marks_in(lines: str) -> list[Mark]:
    return [Mark(named or "", reason) for named, reason in _MARK.findall(lines)]
