"""Tables at any width: no number is cut, and the columns that are left out are named."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from itertools import product

import pytest
from rich.console import Console

from fsdp_lab.report.terminal import Column, FittingTable, fit

AXES = {
    "sharding": ("ddp", "per_block"),
    "precision": ("fp32", "bf16_mixed"),
    "reshard_after_forward": ("always", "never"),
    "model._target_": ("my_project.networks.wide.Net", "other.Net"),
}
ROWS = list(product(*AXES.values()))
FIGURES = {"train loss": 1.59331, "samples/s": 123456.0, "peak MiB": 98765.43, "largest microbatch": 1254.0}


def columns(axes: dict[str, tuple[str, ...]] = AXES) -> list[Column]:
    rows = list(product(*axes.values()))
    words = [Column(key, [r[i] for r in rows], is_axis=True, justify="left") for i, key in enumerate(axes)]
    drops = {"train loss": 2, "largest microbatch": 1}
    return words + [
        Column(name, [f"{value + number:.2f}" for number in range(len(rows))], drop=drops.get(name, 0))
        for name, value in FIGURES.items()
    ]


def shown(table: FittingTable, width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(table)
    return out.getvalue()


@pytest.mark.parametrize("width", [30, 40, 60, 70, 80, 90, 100, 120, 160])
def test_at_any_width_no_figure_and_no_name_is_cut(width: int):
    text = shown(FittingTable(columns(), elsewhere="results.csv"), width)
    assert max(map(len, text.splitlines())) <= width and "…" not in text
    left = re.search(r"Too narrow for (.*?): see results.csv\.", " ".join(text.split()))
    names = left[1].split(", ") if left else []
    for column in columns():
        if column.name in names:
            continue
        if not column.is_axis:
            assert all(re.search(rf"(?<![\d.]){re.escape(str(cell))}(?![\d.])", text) for cell in column.cells)
        for piece in column.name.replace("_", "_ ").replace(".", ". ").split():
            assert piece in text, (column.name, piece)


def test_columns_leave_in_their_order_and_those_without_one_stay():
    gone: list[str] = []
    for width in range(200, 30, -1):
        kept, now = fit(columns(), width)
        if kept[0].name == "setting":  # the axes have become one column
            break
        gone += [name for name in now if name not in gone]
    assert gone == ["train loss", "largest microbatch"]


def test_many_axes_become_one_column_of_settings_as_they_are_typed():
    axes = {f"model.number_{i}": (str(i), "1") for i in range(9)}
    kept, _ = fit(columns(axes), 80)
    assert [c.name for c in kept] == ["setting", "train\nloss", "samples/s", "peak MiB", "largest\nmicrobatch"]
    assert "model.number_0=0 model.number_1=1 " in str(kept[0].cells[0])


def test_the_line_below_names_what_left_and_where_it_is():
    assert "Too narrow" not in shown(FittingTable(columns(), elsewhere="results.csv"), 160)
    last = shown(FittingTable(columns(), elsewhere="results.csv"), 80).splitlines()[-1]
    assert last == "Too narrow for train loss, largest microbatch: see results.csv."


_PRINTS = """
import sys
from rich.text import Text
from fsdp_lab.report.terminal import Column, FittingTable, open_console
console = open_console()
console.print(FittingTable([Column("setting", ["a", "b"], is_text=True), Column("samples/s", ["*1.5", "2.5"])]))
console.print(Text("Recommended: a", style="bold"))
sys.exit(0 if console.is_terminal else 3)
"""


def on_a_terminal(width: int, **environment: str) -> str:
    """What is printed on a pseudo-terminal of so many columns."""
    main, other = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    known = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")}
    given = {**known, "TERM": "xterm-256color", **environment}
    done = subprocess.run(
        [sys.executable, "-c", _PRINTS], stdin=other, stdout=other, env=given, timeout=60, check=False
    )
    os.close(other)
    assert done.returncode == 0
    with open(main, "rb", buffering=0) as shown_there:
        return shown_there.read(100_000).decode()


def test_a_terminal_shows_styles_and_none_with_no_color():
    styled, plain = on_a_terminal(60), on_a_terminal(60, NO_COLOR="1")
    assert "\x1b[1mRecommended: a\x1b[0m" in styled
    assert "\x1b" not in plain and "Recommended: a" in plain and "*1.5" in plain


def test_a_pipe_gets_plain_lines():
    done = subprocess.run([sys.executable, "-c", _PRINTS], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3 and "\x1b" not in done.stdout and "Recommended: a" in done.stdout
