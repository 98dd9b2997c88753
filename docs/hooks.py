"""What MkDocs asks while it builds the site: the pages that lie outside of `docs/`.

A file of the repository is the page `repository/<path>`, links between pages of both kinds are put right.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
FOLDER = "repository"
# Pages and pictures outside of docs/ that the site has, too.
BROUGHT = (
    "CONTRIBUTING.md",
    "tests/README.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "benchmarks/*.md",
    "deploy/*.md",
    "experiments/**/README.md",
    "experiments/**/*.png",
)
_MARK = re.compile(r"<!-- (?:generated: \S+|end) -->\n")  # around what docs/tables.py writes
_LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages and pictures that lie outside of `docs/`."""
    for pattern in BROUGHT:
        for file in sorted(ROOT.glob(pattern)):
            files.append(File.generated(config, page_of(file.relative_to(ROOT).as_posix()), abs_src_path=str(file)))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """Put the links of a page right."""
    source = path_of(page.file.src_uri)
    return _LINK.sub(lambda found: found[1] + moved(found[2], source) + found[3], _MARK.sub("", markdown))


def page_of(path: str) -> str:
    """Return the page of a file, as MkDocs names pages.

    Args:
        path: seen from the root of the repository.
    """
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{FOLDER}/{path}"


def path_of(page: str) -> str:
    """Return the file of a page; the inverse of `page_of`."""
    return page.removeprefix(f"{FOLDER}/") if page.startswith(f"{FOLDER}/") else f"docs/{page}"


def moved(link: str, source: str) -> str:
    """Return a relative link between two files as one between their pages."""
    if "://" in link or link.startswith(("/", "mailto:")):
        return link
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    return posixpath.relpath(page_of(target), posixpath.dirname(page_of(source)) or ".")
