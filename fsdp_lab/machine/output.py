"""Standard output that survives a reader that leaves, and characters that its encoding lacks."""

from __future__ import annotations

import io
import os
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
    """Keep the exit status of the work, whatever happens to standard output and error.

    Streams that were closed before the start become /dev/null; otherwise the next opened file would get their output.
    Characters that their encoding lacks are written as `?`. Streams that other code has replaced, such as a notebook's,
    stay as they are.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free number
    for number, name in enumerate(("stdout", "stderr"), 1):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper | None) and stream is getattr(sys, f"__{name}__"):
            if stream is not None:
                stream.flush()
            raw = io.BufferedWriter(_Outlasting(number, "w", closefd=False))
            setattr(
                sys,
                name,
                io.TextIOWrapper(raw, stream.encoding if stream is not None else None, "replace", line_buffering=True),
            )
