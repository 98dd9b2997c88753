"""Tables that fit a terminal: columns are dropped in a stated order, and numbers are never cut."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

_FILE_WIDTH = 200  # a file or a pipe has no width of its own; COLUMNS sets another
_GAP, _SMALL_GAP = 2, 1  # between two columns
_NARROW_TEXT, _WHOLE_WORD = 16, 32  # the least width of a text, and the longest word that never breaks


def open_console() -> Console:
    """Return a console on standard output, wide enough for whole tables if that is no terminal.

    With NO_COLOR (https://no-color.org) it also writes no bold or dim text. In a notebook it prints text, like a pipe.
    """
    color: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"
    console = Console(color_system=color, force_jupyter=False)
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=_FILE_WIDTH)


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        name: its heading.
        cells: one for each row.
        drop: 0: it stays at any width. Of the others, the highest is dropped first.
        is_axis: its cells are the values of a key. Axes that do not fit side by side become one text, `setting`.
        is_text: its cells wrap between words. Those of other columns take one line.
    """

    name: str
    cells: Sequence[str | Text]
    drop: int = 0
    is_axis: bool = False
    is_text: bool = False
    justify: Literal["left", "right"] = "right"

    @property
    def longest(self) -> int:
        return max((cell_len(str(cell)) for cell in self.cells), default=0)

    @property
    def narrowest(self) -> int:
        """The least width that breaks neither a cell nor a word of its heading or of a text."""
        cells = self.longest
        if self.is_text:
            words = [cell_len(word) for cell in self.cells for word in str(cell).split()]
            cells = max(min(_NARROW_TEXT, cells), min(_WHOLE_WORD, max(words, default=0)))
        return max(cells, *map(cell_len, self.name.split("\n")))

    @property
    def stacked(self) -> Column:
        """The column with a heading of several lines, if that is longer than the cells."""
        name = re.sub(r"(?<=[_.])(?=.)| ", "\n", self.name)
        return replace(self, name=name) if cell_len(self.name) > self.longest else self


@dataclass(frozen=True)
class FittingTable:
    """A table as wide as the terminal that it is printed on, with a line about the columns that are left out.

    Attributes:
        title: "": none.
        elsewhere: the file that has all columns; "": none.
    """

    columns: Sequence[Column]
    title: str = ""
    elsewhere: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.title:
            yield Text(self.title, style="italic")
        columns, left_out = fit(self.columns, options.max_width)
        if _needed(columns, _SMALL_GAP) > options.max_width:  # a line for each cell
            for number in range(len(columns[0].cells)):
                yield from (Text(f"{c.name}: {str(c.cells[number]).strip()}") for c in self.columns)
                yield Text()
            return
        yield _table(columns, options.max_width)
        if left_out:
            where = f": see {self.elsewhere}" if self.elsewhere else ""
            yield Text(f"Too narrow for {', '.join(left_out)}{where}.", style="dim")


def fit(columns: Sequence[Column], width: int) -> tuple[list[Column], list[str]]:
    """Return the columns that a terminal of this width shows, and the names of those that are dropped.

    Headings are stacked if they do not fit as they are. Then columns are dropped until the others fit. If those that
    always stay do not fit, the axes become one column.
    """
    if _needed(columns) <= width:
        return list(columns), []
    kept, dropped = _drop([column.stacked for column in columns], width)
    axes = [column for column in columns if column.is_axis]
    if _needed(kept, _SMALL_GAP) > width and len(axes) > 1:
        rows = zip(*(column.cells for column in axes), strict=True)
        cells = [" ".join(f"{axis.name}={cell}" for axis, cell in zip(axes, row, strict=True)) for row in rows]
        others = [column.stacked for column in columns if not column.is_axis]
        others.insert(columns.index(axes[0]), Column("setting", cells, is_text=True, justify="left"))
        kept, dropped = _drop(others, width)
    return kept, [column.name.replace("\n", " ") for column in dropped]


def _drop(columns: Sequence[Column], width: int) -> tuple[list[Column], list[Column]]:
    kept = list(columns)
    while _needed(kept) > width and (droppable := [column for column in kept if column.drop]):
        kept.remove(max(droppable, key=lambda column: column.drop))
    return kept, [column for column in columns if column not in kept]


def _needed(columns: Sequence[Column], gap: int = _GAP) -> int:
    return sum(column.narrowest for column in columns) + gap * (len(columns) - 1)


def _table(columns: Sequence[Column], width: int) -> Table:
    gap = _GAP if _needed(columns) <= width else _SMALL_GAP
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, gap - 1, 0, 0))
    for c in columns:
        table.add_column(Text(c.name), justify=c.justify, min_width=c.narrowest, no_wrap=not c.is_text, overflow="fold")
    for row in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table
