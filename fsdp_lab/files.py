"""Files that are either whole or absent."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fsdp_lab.config import UserError

RESTORE = "restore it from a copy, or remove it"


def read_json(path: Path, remedy: str = RESTORE) -> Any:
    """Return the content; None for no file.

    Args:
        remedy: for a file that cannot be read.

    Raises:
        UserError: the file holds no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise UserError(f"{path} cannot be read ({error}); {remedy}.") from None


def read_lines(path: Path, *required: str, remedy: str = RESTORE) -> Iterator[dict[str, Any]]:
    """Yield the object in each line, but not in a last line that a kill cut short; nothing for no file.

    Args:
        *required: the keys that each object must have.
        remedy: for a file that cannot be read.

    Raises:
        UserError: a line cannot be read.
    """
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    for number, line in enumerate(text.split("\n")[:-1], 1):
        try:
            content = json.loads(line)
            if not isinstance(content, dict) or not content.keys() >= {*required}:
                raise ValueError(f"it is no object with {', '.join(required)}")
        except ValueError as error:
            raise UserError(f"{path}: line {number} cannot be read ({error}); {remedy}.") from None
        yield content


def append_line(path: Path, text: str) -> None:
    """Append a line, in place of a partial one that a kill left."""
    with path.open("ab+") as lines:
        if lines.tell() > 0:
            lines.seek(-1, os.SEEK_END)
            if lines.read(1) != b"\n":
                lines.truncate(path.read_bytes().rfind(b"\n") + 1)
        lines.write(f"{text}\n".encode())


@contextmanager
def whole(path: Path, durable: bool = False, parents: bool = True) -> Iterator[Path]:
    """Yield a temporary name to write under, and rename it at the end: a reader never sees half a file.

    If the block raises, nothing is left.

    Args:
        durable: return when the file and its name are on the disk, so that they survive a power cut: for files that a
            resume needs.
        parents: make its folder. Not for files in a trial's or a sweep's folder, which must not be made again if it was
            removed meanwhile.

    Raises:
        OSError: with the path, which Python omits if a write fails (a full disk).
    """
    making = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.making")
    try:
        if parents:
            path.parent.mkdir(parents=True, exist_ok=True)
        yield making
        if durable:
            sync(making)
        making.rename(path)
        if durable:
            sync(path.parent)
    except BaseException as error:
        with suppress(OSError):
            making.unlink()
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder to write in, which replaces the one at `path` at the end, durably.

    If the block raises, nothing is left, and the old folder stays.

    Raises:
        OSError: the parent folder is gone, or the disk is full.
    """
    making = path.with_name(f".{path.name}.{os.getpid()}.making")
    try:
        making.mkdir()
        yield making
        for file in making.iterdir():
            sync(file)
        shutil.rmtree(path, ignore_errors=True)
        making.rename(path)
        sync(path.parent)
    except BaseException:
        shutil.rmtree(making, ignore_errors=True)
        raise


def write_text(path: Path, text: str, durable: bool = False, parents: bool = True) -> None:
    """Write text; see `whole`."""
    with whole(path, durable, parents) as making:
        making.write_text(text, encoding="utf-8")


def write_json(path: Path, content: Any, durable: bool = False, parents: bool = True) -> None:
    """Write JSON; see `whole`."""
    write_text(path, json.dumps(content, indent=1), durable, parents)


def sync(path: Path) -> None:
    """Put the content of a file, or the names in a folder, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
