"""A private name of a library, and whether the installed version still has it as we use it."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Name:
    """A name in a module, dotted, and the parameters that we give it or take in its place (None: not looked at)."""

    module: str
    name: str
    parameters: tuple[str, ...] | None = None

    def lacks(self) -> str | None:
        """Return what the installed version does not have, for people to read; None where it is as we need it."""
        shown = f"{self.module}.{self.name}"
        try:
            found: Any = importlib.import_module(self.module)
            for part in self.name.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError):
            return shown
        if self.parameters is None:
            return None
        has = inspect.signature(found).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in has.values())
        unknown = [name for name in self.parameters if name not in has and not takes_any]
        return f"{shown}({', '.join(unknown)})" if unknown else None
