"""Imports without Python's garbage collector: call `begin` before them, and `end` after them.

While modules are imported, the collector goes through everything that was imported before, again and again, and finds
next to nothing. It takes a fifth of the time of a rank's imports (`benchmarks/README.md`).
"""

from __future__ import annotations

import gc
import threading

_LIMIT_S = 60.0  # for a process in which nobody calls `end`
_at_limit: threading.Timer | None = None


def begin() -> None:
    """Collect no garbage until `end`, or for a minute."""
    global _at_limit
    gc.disable()
    _at_limit = threading.Timer(_LIMIT_S, gc.enable)
    _at_limit.name, _at_limit.daemon = "quick_imports", True
    _at_limit.start()


def end() -> None:
    """Collect garbage again, except among the objects that are there now. Does nothing without a `begin`."""
    global _at_limit
    if _at_limit is not None:
        _at_limit.cancel()
        _at_limit.join()  # a process without threads can be forked
        _at_limit = None
        gc.freeze()
        gc.enable()
