"""The CPU use of other processes: while they compute, the speed of a trial on a CPU means nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress

import psutil

from fsdp_lab.machine.hardware import WORKER_CPUS

_IDLE = ("idle", "iowait", "guest", "guest_nice")  # user time already includes guest time


class Window:
    """A span of time that starts when this object is created.

    Args:
        roots: these processes and their descendants are our own. A descendant that starts and ends between two calls of
            `share` counts as another process.
    """

    def __init__(self, *roots: psutil.Process) -> None:
        self._roots, self._begun, self._busy_before = roots, time.monotonic(), _busy_s()
        self._seen, self._ours = _family_s(roots), 0.0

    def share(self) -> float:
        """Return the share of all cores' time that other processes have used so far, 0 to 1."""
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
