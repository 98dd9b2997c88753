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
from fsdp_lab.config.serialize import typed

RESTORE = "restore it from a copy, or remove it"  # callers add what a removal loses
_REMOVE = "remove it: the next start writes a new one"
_UNREADABLE = (ValueError, OverflowError, RecursionError)


def read_object(path: Path, remedy: str = _REMOVE, others: Any = None, **types: Any) -> dict[str, Any] | None:
    """Return the JSON object in a file; None for no file.

    Args:
        remedy: for a file that cannot be read.
        others: the type of the values of all other keys; None: any.
        **types: key -> the type of its value, as in a dataclass. A key is required unless its type is optional.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        return _object(path.read_text(encoding="utf-8"), others, types)
    except FileNotFoundError:
        return None
    except PermissionError:
        raise _not_ours(path) from None
    except _UNREADABLE as error:
        raise UserError(f"{path} cannot be read ({error}); {remedy}.") from None


def read_lines(path: Path, remedy: str, others: Any = None, **types: Any) -> Iterator[dict[str, Any]]:
    """Yield the object in each line, except a last line that a kill cut short. Arguments and errors as above."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    except PermissionError:
        raise _not_ours(path) from None
    for number, line in enumerate(text.split("\n")[:-1], 1):
        try:
            content = _object(line, others, types)
        except _UNREADABLE as error:
            raise UserError(f"{path}: line {number} cannot be read ({error}); {remedy}.") from None
        yield content


def _not_ours(path: Path) -> UserError:
    return UserError(f"this user may not read {path}; ask its owner for a copy of the folder that you may read.")


def _object(text: str, others: Any, types: dict[str, Any]) -> dict[str, Any]:
    content = json.loads(text)
    if not isinstance(content, dict):
        raise ValueError("it is not a JSON object")
    types = {**(dict.fromkeys(content, others) if others else {}), **types}
    content |= {key: typed(hint, content.get(key), key) for key, hint in types.items()}
    return {key: value for key, value in content.items() if value is not None or key not in types}


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
        durable: return only when the file and its name are on the disk, so that they survive a power cut; for files
            that a resume needs.
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
