"""Commands that run in a session of their own, under a limit, and leave nothing behind."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_GRACE_S = 10.0  # for processes that are ending when their command has ended


@dataclass(frozen=True)
class Ran:
    """`status`: None when the limit ended the command. `left`: the names of processes that outlived it."""

    status: int | None
    seconds: float
    left: list[str]


def run(
    command: list[str], environment: dict[str, str], log: Path, limit_s: float, memory_limit: int | None = None
) -> Ran:
    """Run to the end or to the limit, then end every process that is left. Output goes to `log` and to stderr.

    Args:
        memory_limit: address space of each process in bytes: what exceeds it is refused, however the machine
            overcommits memory.
    """
    adopt_orphans()
    before = {process.pid for process in descendants()}
    log.parent.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    with log.open("wb") as out, log.open("rb") as shown:
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=prepare(memory_limit),
        )
        try:
            while (status := process.poll()) is None and time.monotonic() - begun < limit_s:
                time.sleep(0.2)
                show(shown.read())
            seconds = time.monotonic() - begun
            left = wait_for_end(process.pid, before) if status is not None else []
        finally:
            end_all(process, before)
            show(shown.read())
    return Ran(status, seconds, left)


def prepare(memory_limit: int | None) -> Callable[[], None]:
    """What the child does before the command: it ends with this process, and keeps to the limit."""
    libc = ctypes.CDLL(None)

    def before_exec() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if memory_limit is not None:
            resource.setrlimit(resource.RLIMIT_AS, (memory_limit, memory_limit))

    return before_exec


def adopt_orphans() -> None:
    """Let processes whose parent ended become children of this one, whatever session they are in."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def show(output: bytes) -> None:
    if output:
        sys.stderr.write(output.decode(errors="replace"))
        sys.stderr.flush()


def descendants() -> list[psutil.Process]:
    """All below this process that still run."""
    processes = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
    return processes


def remaining(session: int, before: set[int]) -> list[psutil.Process]:
    """Processes of the session, and those below this process that were not there before the command."""
    by_pid = {process.pid: process for process in descendants() if process.pid not in before}
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, ProcessLookupError, PermissionError):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                by_pid[process.pid] = process
    return list(by_pid.values())


def wait_for_end(session: int, before: set[int]) -> list[str]:
    """The names of those that run on after the grace period."""
    until = time.monotonic() + _GRACE_S
    while (left := remaining(session, before)) and time.monotonic() < until:
        time.sleep(0.2)
    names = []
    for process in left:
        with suppress(psutil.NoSuchProcess):
            names.append(process.name())
    return sorted(names)


def end_all(process: subprocess.Popen[bytes], before: set[int]) -> None:
    """End the command's group, then whatever else is left; a killed parent hands its children to this process."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for _ in range(5):
        left = remaining(process.pid, before)
        if not left:
            return
        for one in left:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(left, timeout=2.0)
