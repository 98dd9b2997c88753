"""The templates of a report."""

from __future__ import annotations

import re
from typing import Any


def environment(html: bool, package: str = "fsdp_lab.report") -> Any:
    """Return jinja2's environment for a package's templates; `html`: values are escaped, `code` in backticks marked."""
    from jinja2 import Environment, PackageLoader
    from markupsafe import Markup, escape

    def code(text: str) -> Markup:
        return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))).replace("\n", "<br>"))

    made = Environment(
        loader=PackageLoader(package),
        autoescape=html,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "breakable": lambda name: Markup(str(escape(name)).replace("_", "_<wbr>")),
        "cell": lambda text: as_line(text).replace("|", "\\|"),
        "code": code,
        "line": as_line,
    }
    return made


def as_line(text: str) -> str:
    """Return text on one line of Markdown, without elements: Markdown passes HTML through."""
    return " ".join(str(text).split()).replace("<", "&lt;")
