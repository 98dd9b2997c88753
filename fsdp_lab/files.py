"""Files that are whole or not there at all."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Write under a temporary name, then rename: a reader never sees half a file. Its folder is made.

    Raises:
        OSError: with the path, which Python leaves out where a write fails (a full disk).
    """
    making = path.with_name(f".{path.name}.{os.getpid()}.making")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        making.write_text(text, encoding="utf-8")
        making.rename(path)
    except OSError as error:
        with suppress(OSError):
            making.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_json(path: Path, content: Any) -> None:
    """As `write_text`."""
    write_text(path, json.dumps(content, indent=1))
