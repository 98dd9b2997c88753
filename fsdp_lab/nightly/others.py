"""How much of the machine others had: on a CPU a trial's speed says nothing while somebody else computes."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from types import TracebackType

import psutil

_EVERY_S = 1.0
_IDLE = ("idle", "iowait", "guest", "guest_nice")  # a guest's time is within user's already


class Others:
    """Use as a context; `share` is the part of all cores' time that went to processes that are not this one's
    descendants, or that a hypervisor took, 0 to 1. Processes of ours that live for less than a second count as others'.
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
        begun, busy_before, seen, ours = time.monotonic(), _busy_s(), _family_s(), 0.0
        while not self._over.wait(_EVERY_S):
            now = _family_s()
            ours += sum(max(0.0, seconds - seen.get(pid, 0.0)) for pid, seconds in now.items())
            seen |= now
            elapsed = (time.monotonic() - begun) * (os.cpu_count() or 1)
            self.share = min(max((_busy_s() - busy_before - ours) / elapsed, 0.0), 1.0)


def _busy_s() -> float:
    return sum(seconds for name, seconds in psutil.cpu_times()._asdict().items() if name not in _IDLE)


def _family_s() -> dict[int, float]:
    """Seconds that this process and its descendants have computed, by their ids."""
    me = psutil.Process()
    found = {}
    for process in (me, *me.children(recursive=True)):
        with suppress(psutil.Error):
            times = process.cpu_times()
            found[process.pid] = times.user + times.system
    return found
