"""Output of a command that outlasts its reader, and has a sign for every character."""

from __future__ import annotations

import io
import sys
from contextlib import suppress
from typing import Any


class _Outlasting(io.FileIO):
    """A descriptor whose reader may leave, as `head` does, or whose disk may be full: later lines are dropped."""

    def write(self, data: Any, /) -> int:
        with suppress(OSError):
            return super().write(data)
        return memoryview(data).nbytes


def outlast_reader() -> None:
    """Let the exit status be that of the work, whatever becomes of standard output and error.

    Characters that their encoding lacks are written as `?`. Streams that something else has replaced, such as a
    notebook's, stay as they are.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and stream is getattr(sys, f"__{name}__"):
            stream.flush()
            raw = io.BufferedWriter(_Outlasting(stream.fileno(), "w", closefd=False))
            setattr(sys, name, io.TextIOWrapper(raw, stream.encoding, "replace", line_buffering=True))
