"""Write the tables of `docs/reference` that are made from the code: `python docs/tables.py`.

They stand between `<!-- generated: name -->` and `<!-- end -->`. A test compares them with the code.
"""

from __future__ import annotations

import re
from pathlib import Path

from fsdp_lab import reference

FOLDER = Path(__file__).resolve().parent / "reference"
PAGES = {"keys": reference.keys_page, "options": reference.options_page, "metrics": reference.metrics_page}
_GENERATED = re.compile(r"(<!-- generated: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(markdown: str) -> str:
    """Return a page with its tables as the code has them: by a name in `PAGES`, or in the docstring of a file."""

    def fill(found: re.Match[str]) -> str:
        table = PAGES[found[2]]() if found[2] in PAGES else reference.table_in(found[2])
        return f"{found[1]}\n{table}\n\n{found[3]}"

    return _GENERATED.sub(fill, markdown)


if __name__ == "__main__":
    for page in FOLDER.glob("*.md"):
        page.write_text(filled(page.read_text()))
