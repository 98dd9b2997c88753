"""Files that are whole or not there at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Give a temporary name to write under, and rename it at the end: a reader never sees half a file. Its folder is
    made; where the block raises, nothing is left.

    Raises:
        OSError: with the path, which Python leaves out where a write fails (a full disk).
    """
    making = path.with_name(f".{path.name}.{os.getpid()}.making")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield making
        making.rename(path)
    except BaseException as error:
        with suppress(OSError):
            making.unlink()
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def write_text(path: Path, text: str) -> None:
    """As `whole`."""
    with whole(path) as making:
        making.write_text(text, encoding="utf-8")


def write_json(path: Path, content: Any) -> None:
    """As `whole`."""
    write_text(path, json.dumps(content, indent=1))
