"""The CPU use of other processes: on a CPU a trial's speed is meaningless while they compute."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from types import TracebackType

import psutil

from fsdp_lab.hardware import WORKER_CPUS

_EVERY_S = 1.0
_IDLE = ("idle", "iowait", "guest", "guest_nice")  # a guest's time is within user's already


class Others:
    """Watches the CPU use of other processes inside a context.

    Processes of ours that live for less than a second count as others'.

    Attributes:
        share: the share of all cores' time, 0 to 1, of processes that do not descend from this one, or that a
            hypervisor took.
    """

    def __init__(self) -> None:
        self.share = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="others", daemon=True)

    def __enter__(self) -> Others:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(2 * _EVERY_S)

    def _watch(self) -> None:
        window = Window(psutil.Process())
        while not self._over.wait(_EVERY_S):
            self.share = window.share()


class Window:
    """The time from when this is made.

    Args:
        roots: our own are these processes and their descendants. Those that begin and end between two calls of `share`
            count as others'.
    """

    def __init__(self, *roots: psutil.Process) -> None:
        self._roots, self._begun, self._busy_before = roots, time.monotonic(), _busy_s()
        self._seen, self._ours = _family_s(roots), 0.0

    def share(self) -> float:
        """Return the share of all cores' time that other processes had so far, 0 to 1."""
        now = _family_s(self._roots)
        self._ours += sum(max(0.0, seconds - self._seen.get(pid, 0.0)) for pid, seconds in now.items())
        self._seen |= now
        elapsed = (time.monotonic() - self._begun) * (os.cpu_count() or 1)
        return min(max((_busy_s() - self._busy_before - self._ours) / max(elapsed, 1e-9), 0.0), 1.0)


def launchers() -> list[psutil.Process]:
    """Return the process that started the ranks of this node: the raylet or torchrun, else this process."""
    me = psutil.Process()
    with suppress(psutil.Error, ValueError):
        parent = me.parent()
        if parent is not None and (WORKER_CPUS in os.environ or "TORCHELASTIC_RUN_ID" in os.environ):
            return [parent]
    return [me]


def _busy_s() -> float:
    return sum(seconds for name, seconds in psutil.cpu_times()._asdict().items() if name not in _IDLE)


def _family_s(roots: Iterable[psutil.Process]) -> dict[int, float]:
    """Return the CPU seconds of processes and their descendants, by their ids."""
    seconds_by_pid = {}
    for root in roots:
        with suppress(psutil.Error):
            for process in (root, *root.children(recursive=True)):
                with suppress(psutil.Error):
                    times = process.cpu_times()
                    seconds_by_pid[process.pid] = times.user + times.system
    return seconds_by_pid
