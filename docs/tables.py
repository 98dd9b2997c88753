"""Write the tables of the pages that are made from the code: `python docs/tables.py`.

They stand between `<!-- generated: name -->` and `<!-- end -->`. A test compares them with the code.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from fsdp_lab.commands import reference

DOCS = Path(__file__).resolve().parent
FILES = (*(DOCS / "reference").glob("*.md"), DOCS / "architecture.md")


def rooms_picture() -> str:
    """Return the rooms, lowest first, and which imports which, from the import statements."""
    rooms: dict[str, set[str]] = {}
    for init in (DOCS.parent / "fsdp_lab").glob("*/__init__.py"):
        # `__main__.py` is where a command starts: it calls `commands`, and is no part of its room
        sources = [file.read_text() for file in init.parent.rglob("*.py") if file.name != "__main__.py"]
        nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
        modules = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        rooms[init.parent.name] = {m.split(".")[1] for m in modules if m.startswith("fsdp_lab.")} - {init.parent.name}
    ordered: list[str] = []
    while rest := sorted(set(rooms) - set(ordered)):
        ordered.append(next(room for room in rest if rooms[room] <= set(ordered)))
    lines = [
        f"{room:<10}" + "".join(f"{'x' if other in rooms[room] else '.':>{len(other) + 1}}" for other in ordered[:n])
        for n, room in enumerate(ordered)
    ]
    return "\n".join(["```", " " * 10 + "".join(f" {room}" for room in ordered), *lines, "```"])


PAGES = {
    "rooms": rooms_picture,
    "keys": reference.keys_page,
    "options": reference.options_page,
    "metrics": reference.metrics_page,
}
_GENERATED = re.compile(r"(<!-- generated: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(markdown: str) -> str:
    """Return a page with its tables as the code has them: by a name in `PAGES`, or in the docstring of a file."""

    def fill(found: re.Match[str]) -> str:
        table = PAGES[found[2]]() if found[2] in PAGES else reference.table_in(found[2])
        return f"{found[1]}\n{table}\n\n{found[3]}"

    return _GENERATED.sub(fill, markdown)


if __name__ == "__main__":
    for page in FILES:
        page.write_text(filled(page.read_text()))
