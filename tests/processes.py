"""Other processes, any of which may end while it is looked at."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import psutil


def descendants(pid: int | None = None) -> list[psutil.Process]:
    """All below the process with that id (default: this one); none when it is gone."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def called(word: str, pid: int | None = None) -> list[psutil.Process]:
    """Those among the descendants with that word in their command line."""
    collected = []
    for process in descendants(pid):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if word in " ".join(process.cmdline()):
                collected.append(process)
    return collected


def marked(name: str, value: str) -> list[psutil.Process]:
    """Every process of this machine that was started with that variable in its environment, or forked by one."""
    collected = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get(name) == value:
                collected.append(process)
    return collected


def still_running(processes: Iterable[psutil.Process], seconds: float) -> list[str]:
    """The names of those that run on after so many seconds; a zombie has ended."""
    names = []
    for process in psutil.wait_procs(list(processes), timeout=seconds)[1]:
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                names.append(process.name())
    return names
