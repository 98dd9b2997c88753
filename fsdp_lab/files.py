"""Files that are whole or not there at all, and what is done about those that are damaged all the same."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_reported: set[Path] = set()


def report_damaged(path: Path, why: object, what_now: str = "it counts as absent") -> None:
    """Warn on standard error, once for each file."""
    if path not in _reported:
        _reported.add(path)
        print(f"fsdp_lab: warning: {path} is damaged ({why}); {what_now}", file=sys.stderr, flush=True)


def read_json(path: Path, what_now: str = "it counts as absent") -> Any:
    """Return the content; None where there is no such file, or, with a warning, where it is no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        report_damaged(path, error if path.stat().st_size else "it is empty", what_now)
        return None


@contextmanager
def whole(path: Path, durable: bool = False, parents: bool = True) -> Iterator[Path]:
    """Give a temporary name to write under, and rename it at the end: a reader never sees half a file. Where the block
    raises, nothing is left.

    Args:
        parents: make its folder. Not for what a trial or a sweep writes into its own: one that was removed meanwhile is
            not to come back.
        durable: return when the file and its name are on the disk, where a power cut leaves them: for what a resume
            cannot do without.

    Raises:
        OSError: with the path, which Python leaves out where a write fails (a full disk).
    """
    making = path.with_name(f".{path.name}.{os.getpid()}.making")
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
    """Give an empty folder beside it to write in, which takes its place at the end, durably. Where the block raises,
    nothing is left, and what was there before stays.

    Raises:
        OSError: its own folder is gone, or the disk is full.
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
    """As `whole`."""
    with whole(path, durable, parents) as making:
        making.write_text(text, encoding="utf-8")


def write_json(path: Path, content: Any, durable: bool = False, parents: bool = True) -> None:
    """As `whole`."""
    write_text(path, json.dumps(content, indent=1), durable, parents)


def sync(path: Path) -> None:
    """Put the content of a file, or the names in a folder, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
