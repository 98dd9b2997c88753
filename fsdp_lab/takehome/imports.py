"""The imports of a script, and the names that it gives them."""

from __future__ import annotations

import io
import sys
import tokenize
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from fsdp_lab.config.errors import UserError

WIDTH = 118
# The script's own variables: an import with such a name is renamed.
_OWN = (
    "batch", "chosen", "contexts", "converted", "count", "cuda", "device", "dist", "epoch", "example", "generator",
    "i", "inputs", "inside", "items", "labels", "last", "loader", "loss", "losses", "m", "math", "mesh",
    "microbatches", "mine", "model", "module", "numpy", "optimizer", "options", "order", "os", "outputs", "part",
    "parts", "products", "random", "rank", "re", "saved", "scale", "scaler", "schedule", "step", "sys",
    "to_device", "torch", "total", "total_loss", "units", "world_size", "zlib",
)  # fmt: skip


class Imports:
    """Collects imports while the lines that need them are written."""

    def __init__(self) -> None:
        self._modules: set[str] = set()
        self._names: dict[str, str] = {}  # name in the script -> the line that imports it

    def module(self, *names: str) -> None:
        """Import whole modules, such as `os`, or `numpy as np`."""
        self._modules |= set(names)

    def name(self, module: str, name: str) -> str:
        """Import a name from a module, and return its name in the script.

        Raises:
            UserError: one of them is no identifier.
        """
        if not all(part.isidentifier() for part in (*module.split("."), name)):
            raise UserError(f"{module}.{name} is not a path to a name; no script can import it.")
        line = f"from {module} import {name}"
        shown = name
        while shown in _OWN or self._names.get(shown, line) != line:
            shown, line = f"{shown}_", f"from {module} import {name} as {shown}_"
        self._names[shown] = line
        return shown

    def path(self, path: str) -> str:
        """Import what a dotted path names, and return the expression for it.

        Names of modules begin with a small letter. If no name of the path begins with a capital, only the last one is
        no module.
        """
        parts = path.split(".")
        first = next((i for i, part in enumerate(parts) if part[:1].isupper()), len(parts) - 1)
        if first == 0:
            self.module(parts[0])
            return path
        return ".".join((self.name(".".join(parts[:first]), parts[first]), *parts[first + 1 :]))

    def kind(self, path: str) -> str | None:
        """Import a class by `module:Name`, and return the expression for it; None if no script can import it."""
        module, _, name = path.partition(":")
        if module == "__main__" or "<" in name:
            return None
        outer, *inner = name.split(".")
        return ".".join((self.name(module, outer), *inner))

    def lines(self) -> list[str]:
        """Return the import statements: Python's own modules on one line, then the others."""
        own = sorted(name for name in self._modules if name in sys.stdlib_module_names)
        others = sorted(self._modules - set(own))
        first = [f"import {', '.join(own)}"] if own else []
        return [*first, *(f"import {name}" for name in others), *_merged(self._names.values())]


def _merged(lines: Any) -> list[str]:
    """Return one statement for each module."""
    by_module: dict[str, list[str]] = {}
    for line in sorted(lines):
        module, _, names = line.removeprefix("from ").partition(" import ")
        by_module.setdefault(module, []).append(names)
    lines = [(f"from {module} import ", ", ".join(names)) for module, names in by_module.items()]
    return [head + (names if len(head + names) <= WIDTH else f"({names})") for head, names in lines]


def call(function: str, arguments: Mapping[str, Any], imports: Imports) -> str:
    """Return a call on one line.

    Args:
        function: the expression that is called.
        arguments: plain values, and dictionaries with a `_target_` for objects.
        imports: collects the imports of the script.
    """
    return f"{function}({', '.join(f'{name}={_expression(value, imports)}' for name, value in arguments.items())})"


def _expression(value: Any, imports: Imports) -> str:
    if isinstance(value, dict) and "_target_" in value:
        given = {name: inner for name, inner in value.items() if name != "_target_"}
        return call(imports.path(str(value["_target_"])), given, imports)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name!r}: {_expression(inner, imports)}" for name, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_expression(inner, imports) for inner in value) + "]"
    return repr(value)


def fold(line: str) -> list[str]:
    """Break a statement that is too long after commas inside brackets. A statement without such commas stays long."""
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    lines, start, commas = [line], 0, _commas(line)
    while len(lines[-1]) > WIDTH:
        room = start + WIDTH - (len(indent) if start else 0)
        if not (cut := max((at for at in commas if start < at <= room), default=0)):
            break
        lines[-1] = (indent if start else "") + line[start:cut].lstrip(" " if start else "")
        start = cut + 1
        lines.append(indent + line[start:])
    return lines


def _commas(line: str) -> list[int]:
    """Return the positions after the commas of a line that are inside brackets and in no string."""
    indent, depth = len(line) - len(line.lstrip()), 0
    commas: list[int] = []
    with suppress(tokenize.TokenError, SyntaxError):  # part of a statement, which ends in the middle
        for token in tokenize.generate_tokens(io.StringIO(line.lstrip()).readline):
            depth += (token.string in "([{") - (token.string in ")]}") if token.type == tokenize.OP else 0
            commas += [token.end[1] + indent] if token.string == "," and depth > 0 else []
    return commas


def indented(lines: Sequence[str], levels: int) -> list[str]:
    """Return the lines indented by so many levels of four spaces."""
    return [f"{'    ' * levels}{line}" for line in lines]
