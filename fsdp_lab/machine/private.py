"""A private name of a library, and whether the installed version still has it as we use it."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Name:
    """A dotted name in a module, and the parameters that we pass to it or accept in its place (None: not checked)."""

    module: str
    name: str
    parameters: tuple[str, ...] | None = None

    def lacks(self) -> str | None:
        """Return what the installed version lacks, as text; None if it has the name with these parameters."""
        shown = f"{self.module}.{self.name}"
        try:
            value: Any = importlib.import_module(self.module)
            for part in self.name.split("."):
                value = getattr(value, part)
        except (ImportError, AttributeError):
            return shown
        if self.parameters is None:
            return None
        has = inspect.signature(value).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in has.values())
        unknown = [name for name in self.parameters if name not in has and not takes_any]
        return f"{shown}({', '.join(unknown)})" if unknown else None
