"""Other processes, any of which may end while it is looked at; and real control groups for them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest


def descendants(pid: int | None = None) -> list[psutil.Process]:
    """All below the process with that id (default: this one); none when it is gone."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def called(word: str, pid: int | None = None) -> list[psutil.Process]:
    """Those among the descendants with that word in their command line."""
    return _those(descendants(pid), lambda process: word in " ".join(process.cmdline()))


def marked(name: str, value: str) -> list[psutil.Process]:
    """Every process of this machine that was started with that variable in its environment, or forked by one."""
    return _those(psutil.process_iter(), lambda process: process.environ().get(name) == value)


@contextmanager
def ordinary_user() -> Iterator[Path]:
    """Be a user whom the modes of files hold, with a folder of their own: root reads and writes everything."""
    root = os.geteuid() == 0
    with tempfile.TemporaryDirectory() as folder:
        if root:
            os.chown(folder, 65534, 65534)
            os.setresuid(65534, 65534, 0)
        try:
            yield Path(folder)
        finally:
            if root:
                os.setresuid(0, 0, 0)


def still_running(processes: Iterable[psutil.Process], seconds: float) -> list[str]:
    """The names of those that run on after so many seconds; a zombie has ended."""
    left = psutil.wait_procs(list(processes), timeout=seconds)[1]
    return [process.name() for process in _those(left, lambda process: process.status() != psutil.STATUS_ZOMBIE)]


def kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _those(processes: Iterable[psutil.Process], condition: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
    collected = []
    for process in processes:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if condition(process):
                collected.append(process)
    return collected


@contextmanager
def group(controller: str, **limits: int) -> Iterator[Path]:
    """A control group of version 1, for processes that write their number into its `cgroup.procs`."""
    folder = Path("/sys/fs/cgroup", controller, f"fsdp_lab_test_{os.getpid()}")
    try:
        folder.mkdir()
        for name, value in limits.items():
            (folder / f"{controller}.{name}").write_text(str(value))
    except OSError as error:
        with suppress(OSError):
            folder.rmdir()
        pytest.skip(f"no control group of version 1 can be made here: {error}")
    try:
        yield folder
    finally:
        folder.rmdir()


def enter(folder: Path) -> None:
    (folder / "cgroup.procs").write_text(str(os.getpid()))
