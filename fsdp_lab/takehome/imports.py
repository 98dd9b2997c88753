"""The imports of a script, the expressions that need them, and its lines."""

from __future__ import annotations

import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from fsdp_lab.config.errors import UserError

_WIDTH = 120


class Imports:
    """Collects imports while the expressions that need them are written."""

    def __init__(self) -> None:
        self._names: dict[str, tuple[str, str]] = {}  # name in the script -> module and name

    def path(self, path: str) -> str:
        """Import what a dotted path names, and return the expression for it.

        A colon ends the module. In a path without one, names of modules begin with a small letter; if no name begins
        with a capital, only the last one is no module. What begins with a small letter gets a name that ends with a
        low line, as none of the script's variables does.

        Raises:
            UserError: a part of the path is no identifier.
        """
        module, colon, inner = path.partition(":")
        parts = [*module.split("."), *inner.split(".")] if colon else path.split(".")
        if not all(part.isidentifier() for part in parts):
            raise UserError(f"{path} is not a path to a name; no script can import it.")
        guess = next((i for i, part in enumerate(parts) if part[:1].isupper()), len(parts) - 1)
        first = len(module.split(".")) if colon else max(1, guess)
        imported = ".".join(parts[:first]), parts[first]
        shown = parts[first] if parts[first][:1].isupper() else f"{parts[first]}_"
        while self._names.setdefault(shown, imported) != imported:
            shown += "_"
        return ".".join((shown, *parts[first + 1 :]))

    def is_one_of(self, classes: Sequence[str]) -> str:
        """Return the condition that `m` is of one of these classes, `module:Name`; by name if none can be imported."""
        if any("<" in path or path.startswith("__main__:") for path in classes):
            names = tuple(path.rpartition(":")[2].rpartition(".")[2] for path in classes)
            return f"type(m).__name__ in {names}"
        kinds = [self.path(path) for path in classes]
        return f"isinstance(m, {kinds[0] if len(kinds) == 1 else '(' + ', '.join(kinds) + ')'})"

    def call(self, path: str, arguments: Mapping[str, Any]) -> str:
        """Return a call of what a dotted path names.

        Args:
            path: of the callable.
            arguments: plain values, and dictionaries with a `_target_` for objects.

        Raises:
            UserError: the name of an argument is no identifier.
        """
        if wrong := [name for name in arguments if not name.isidentifier()]:
            raise UserError(f"{wrong[0]} is not the name of an argument; no script can be written of it.")
        given = ", ".join(f"{name}={self._expression(value)}" for name, value in arguments.items())
        return f"{self.path(path)}({given})"

    def _expression(self, value: Any) -> str:
        if isinstance(value, dict) and "_target_" in value:
            return self.call(
                str(value["_target_"]), {name: inner for name, inner in value.items() if name != "_target_"}
            )
        if isinstance(value, dict):
            return "{" + ", ".join(f"{name!r}: {self._expression(inner)}" for name, inner in value.items()) + "}"
        if isinstance(value, list | tuple):
            return "[" + ", ".join(map(self._expression, value)) + "]"
        return repr(value)

    def lines(self) -> list[str]:
        """Return the import statements, one for each module."""
        by_module: dict[str, list[str]] = {}
        for shown, (module, name) in sorted(self._names.items()):
            by_module.setdefault(module, []).append(name if shown == name else f"{name} as {shown}")
        return [f"from {module} import {', '.join(names)}" for module, names in sorted(by_module.items())]


def without_unused_imports(head: str, body: str) -> str:
    """Return the head of a script without the imports that its body does not use."""

    def is_used(name: str) -> bool:
        return re.search(rf"(?<![\w.]){re.escape(name.split(' as ')[-1])}\b", body) is not None

    docstring, end, lines = head.rpartition('"""\n')
    kept = []
    for line in lines.splitlines():
        start, names = line.split("import ", 1)
        if used := [name for name in names.split(", ") if is_used(name)]:
            kept.append(f"{start}import {', '.join(used)}")
    return docstring + end + "\n".join(kept)


def break_lines(script: str) -> str:
    """Return a script with its long lines broken behind commas within brackets."""
    depth, commas = 0, defaultdict[int, list[int]](list)
    for token in tokenize.generate_tokens(io.StringIO(script).readline):
        if token.type == tokenize.OP:
            depth += (token.string in "([{") - (token.string in ")]}")
            if token.string == "," and depth:
                commas[token.end[0]].append(token.end[1])
    lines = []
    for number, line in enumerate(script.splitlines(), 1):
        lines.append("")
        for first, last in pairwise([0, *(commas[number] if len(line) > _WIDTH else []), len(line)]):
            if lines[-1] and len(lines[-1]) + last - first > _WIDTH:
                lines.append(" " * (len(line) - len(line.lstrip()) + 3))
            lines[-1] += line[first:last]
    return "\n".join(lines)
