"""Tables that fit a terminal: columns leave in a stated order; headers and digits are never cut."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

_FILE_WIDTH = 200  # a file or a pipe has no width of its own; COLUMNS sets another
_GAP, _SMALL_GAP = 2, 1  # between two columns
_PIECE = re.compile(r"[^\s_./=,]+[_./=,]*|[_./=,]+")  # names and values break behind these


def open_console() -> Console:
    """Return a console on standard output, wide enough for whole tables if that is no terminal.

    With NO_COLOR (https://no-color.org) it also writes no bold or dim text. In a notebook it prints text, like a pipe.
    """
    color: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"
    console = _Console(color_system=color, force_jupyter=False)
    return console if console.is_terminal or "COLUMNS" in os.environ else _Console(width=_FILE_WIDTH)


class _Console(Console):
    """Prints on after its reader has closed the pipe, where rich would end the process."""

    def on_broken_pipe(self) -> None:
        _drop_output()


def _drop_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it exits


def print_to_reader(*lines: str) -> None:
    """Print lines while there is a reader: `head` may close the pipe early, and the disk of a log may be full."""
    try:
        print(*lines, sep="\n", flush=True)
    except BrokenPipeError:
        _drop_output()
    except OSError:
        pass  # later lines may be written


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        name: its heading.
        cells: one for each row.
        drop: 0: it stays at any width. Of the others, the highest is dropped first.
        breaks: its cells are words, which may take several lines. Figures take one.
        justify: of its cells.
        whole: a word of so many letters is not broken.
    """

    name: str
    cells: Sequence[str | Text]
    drop: int = 0
    breaks: bool = False
    justify: Literal["left", "right"] = "right"
    whole: int = 16

    @property
    def narrowest(self) -> int:
        """The least width that breaks no piece of its name and no figure."""
        name = max(map(cell_len, _pieces(self.name, self.breaks)), default=0)
        if not self.breaks:
            return max(name, self.longest_cell)
        words = (cell_len(word) for cell in self.cells for word in str(cell).split())
        return max(name, min(self.whole, max(words, default=0)))

    @property
    def longest_cell(self) -> int:
        """The width of its longest cell, in characters."""
        return max((cell_len(str(cell)) for cell in self.cells), default=0)


def _pieces(text: str, breaks: bool) -> list[str]:
    """Return the pieces of a text after which a line may break: words, and with `breaks` also their parts."""
    return _PIECE.findall(text) if breaks else text.split()


def choose_columns(columns: Sequence[Column], width: int) -> list[Column]:
    """Return the columns that a terminal of this width shows.

    Columns are dropped by their `drop` until the others fit. If those that always stay do not fit even with small gaps,
    the columns of words become one, `setting`; then the others are dropped again.
    """
    kept = _dropped_to(columns, width)
    if _needed(kept, _SMALL_GAP) <= width or sum(column.breaks for column in kept) < 2:
        return kept
    words = [column for column in columns if column.breaks]
    rows = zip(*(column.cells for column in words), strict=True)
    cells = [" ".join(f"{column.name}={cell}" for column, cell in zip(words, row, strict=True)) for row in rows]
    setting = Column("setting", cells, breaks=True, justify="left", whole=32)
    first = columns.index(words[0])
    return _dropped_to([*columns[:first], setting, *(c for c in columns[first:] if not c.breaks)], width)


def _dropped_to(columns: Sequence[Column], width: int) -> list[Column]:
    kept = list(columns)
    while _needed(kept) > width and (droppable := [column for column in kept if column.drop]):
        kept.remove(max(droppable, key=lambda column: column.drop))
    return kept


def _needed(columns: Sequence[Column], gap: int = _GAP) -> int:
    return sum(column.narrowest for column in columns) + gap * (len(columns) - 1)


def break_lines(text: str, width: int, breaks: bool) -> list[str]:
    """Return the text in lines of at most `width`, broken between words.

    Args:
        text: to break.
        width: in characters.
        breaks: also break a word that is too long after its parts (`reshard_after_forward` has three), and a part that
            is too long anywhere.
    """
    lines, gap = [""], ""
    for word in text.split():
        for piece in _pieces(word, breaks) if cell_len(word) > width else [word]:
            if lines[-1] and cell_len(lines[-1] + gap + piece) > width:
                lines.append("")
                gap = ""
            rest = gap + piece
            while breaks and cell_len(rest) > width:
                lines[-1:], rest = [rest[:width], ""], rest[width:]
            lines[-1] += rest
            gap = ""
        gap = " "
    return lines


def _share(columns: Sequence[Column], width: int) -> list[int]:
    """Return the width of each column: spare width goes to cells that would break, then to names."""
    widths = [column.narrowest for column in columns]
    spare = width - _needed(columns)
    for wanted in (
        [column.longest_cell for column in columns],
        [max(column.longest_cell, cell_len(column.name)) for column in columns],
    ):
        while spare > 0 and (short := [i for i, w in enumerate(widths) if w < wanted[i]]):
            for i in short[:spare]:
                widths[i] += 1
            spare -= len(short[:spare])
    return widths


@dataclass(frozen=True)
class FittingTable:
    """A table as wide as the terminal that it is printed on, with a line about the columns that are left out.

    Attributes:
        columns: all of them.
        title: "": none.
        elsewhere: the file that has all columns; "": none.
    """

    columns: Sequence[Column]
    title: str = ""
    elsewhere: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        kept, width = choose_columns(self.columns, options.max_width), options.max_width
        if self.title:
            yield Text(self.title, style="italic")
        if _needed(kept, _SMALL_GAP) > width:
            yield from _records(self.columns)
            return
        yield _table(kept, _share(kept, width), _GAP if _needed(kept) <= width else _SMALL_GAP)
        if left := self._left_out(kept):
            where = f": see {self.elsewhere}" if self.elsewhere else ""
            yield Text(f"Too narrow for {', '.join(left)}{where}.", style="dim")

    def _left_out(self, kept: Sequence[Column]) -> list[str]:
        names = {column.name for column in kept}
        return [c.name for c in self.columns if c.name not in names and not (c.breaks and "setting" in names)]


def _table(columns: Sequence[Column], widths: Sequence[int], gap: int) -> Table:
    heads = [break_lines(c.name, width, c.breaks) for c, width in zip(columns, widths, strict=True)]
    height = max(map(len, heads))
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, gap - 1, 0, 0))
    rows: list[list[Text]] = [[] for _ in columns[0].cells]
    for column, width, head in zip(columns, widths, heads, strict=True):
        cells = [_cell(cell, width, column.breaks) for cell in column.cells]
        used = max(cell_len(line) for text in (*head, *map(str, cells)) for line in text.split("\n"))
        name = "\n" * (height - len(head)) + "\n".join(head)
        table.add_column(Text(name), justify=column.justify, width=used, overflow="fold")
        for row, cell in zip(rows, cells, strict=True):
            row.append(cell)
    for row in rows:
        table.add_row(*row)
    return table


def _cell(cell: str | Text, width: int, breaks: bool) -> Text:
    if breaks:
        return Text("\n".join(break_lines(str(cell), width, breaks)))
    return Text(cell) if isinstance(cell, str) else cell


def _records(columns: Sequence[Column]) -> Iterator[Text]:
    """Yield a line for each cell, for columns that do not fit side by side."""
    for row in zip(*(column.cells for column in columns), strict=True):
        for column, cell in zip(columns, row, strict=True):
            yield Text(f"{column.name}: {str(cell).strip()}")
        yield Text()
