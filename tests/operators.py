"""What PyTorch computes inside a block of code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    """Collects the names of the operators that run, with their namespaces, without their overloads.

    `note` is called with the name, the arguments and the result of each.
    """

    def __init__(self, note: Callable[[str, Any, Any], object] | None = None) -> None:
        super().__init__()
        self.names: list[str] = []
        self._note = note

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        self.names.append(func.overloadpacket._qualified_op_name)
        if self._note is not None:
            self._note(self.names[-1], args, result)
        return result
