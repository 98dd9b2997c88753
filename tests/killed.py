"""Runs a command that kills itself at the n-th call that changes its files. Not imported: `tests/sweep/test_kills.py`
runs this text as `python -c <text> <log> <point> <module> <words>`.

Counted are renames, fsyncs and appends below the working directory, and commits to SQLite; a link counts as a rename.
Before and after each is a point, and for an append also where half of it is on the disk. The log gets a line a point,
such as `rename after out/sweep.json`. At the one whose number is given the process gets SIGKILL; with 0 it runs to its
end.
"""

from __future__ import annotations

import builtins
import io
import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from sqlalchemy.engine.default import DefaultDialect

log, die_at, module, *words = sys.argv[1:]
handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
root = os.getcwd()
counting = threading.Lock()
passed = 0


def point(what: str, name: str, when: str) -> None:
    """Die here if it is this point's turn."""
    global passed
    with counting:
        passed += 1
        os.write(handle, f"{what} {when} {name}\n".encode())
        if passed == int(die_at):
            os.kill(os.getpid(), signal.SIGKILL)


def name_of(path: Any) -> str | None:
    """A path within the working directory; None for another one."""
    absolute = os.path.abspath(os.fspath(path)) if not isinstance(path, int) else os.readlink(f"/proc/self/fd/{path}")
    return os.path.relpath(absolute, root) if absolute.startswith(f"{root}{os.sep}") else None


def counted(what: str, call: Any, position: int, name_of: Any = name_of) -> Any:
    """The same call with a point before it and one after; the argument at `position` gives the name."""

    def with_points(*arguments: Any, **options: Any) -> Any:
        name = name_of(arguments[position])
        if name is not None:
            point(what, name, "before")
        result = call(*arguments, **options)
        if name is not None:
            point(what, name, "after")
        return result

    return with_points


class Appending:
    """A file opened to append, which writes in two halves."""

    def __init__(self, file: Any, name: str) -> None:
        self._file, self._name = file, name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._file, attribute)

    def __enter__(self) -> Appending:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def write(self, content: Any) -> None:
        middle = len(content) // 2
        point("append", self._name, "before")
        for half, when in ((content[:middle], "half"), (content[middle:], "after")):
            self._file.write(half)
            self._file.flush()
            point("append", self._name, when)


def opened(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
    """`open`, which gives another file to append to."""
    result = plain_open(file, mode, *arguments, **options)
    name = name_of(file) if "a" in mode and not isinstance(file, int) else None
    return Appending(result, name) if name is not None else result


def changed_by(connection: Any) -> str | None:
    """The name of the database if there is something to commit."""
    return "mlflow.db" if getattr(connection.dbapi_connection, "in_transaction", False) else None


plain_open = io.open
os.rename, os.replace, os.link = (counted("rename", call, 1) for call in (os.rename, os.replace, os.link))
os.fsync = counted("fsync", os.fsync, 0)
io.open = builtins.open = opened
DefaultDialect.do_commit = counted("commit", DefaultDialect.do_commit, 1, changed_by)
# What is written "at most once a second" is written as often in each run: the clock for that stands still.
now = time.monotonic()
time.monotonic = lambda: now

sys.argv = [module, *words]
sys.modules.pop(f"{module}.__main__", None)  # imported already by the process that this one was forked from
sys.path[0] = str(Path.cwd())
runpy.run_module(module, run_name="__main__", alter_sys=True)
