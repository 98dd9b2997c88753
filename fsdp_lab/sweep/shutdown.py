"""The shutdown after the first interrupt: whatever hangs, the driver has saved its state and exits in time."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fsdp_lab.config.status import ExitCode
from fsdp_lab.engine.cluster import end_descendants
from fsdp_lab.sweep.sweep import Sweep

_LIMIT_S = 8.0  # then what hangs is left behind
_LAST_S = 2.0  # of it, for what the thread of the deadline does itself


class ShutdownGuard:
    """From the first interrupt on: whatever hangs, this process has saved its state and exits in time."""

    def __init__(self, sweep: Sweep) -> None:
        self._sweep = sweep
        self._begun = False
        self.over = threading.Event()

    @property
    def closing(self) -> bool:
        return self.over.is_set() or self._sweep.ending is not None

    def begin(self) -> None:
        """Start the countdown, once."""
        if not self._begun:
            self._begun = True
            self._sweep.ends_by = time.monotonic() + _LIMIT_S - _LAST_S
            threading.Thread(target=self._wait, name="deadline", daemon=True).start()

    def _wait(self) -> None:
        until, logged = self._sweep.ends_by or 0.0, False
        while not self.over.wait(max(0.0, min(2.0, until - time.monotonic()))) and time.monotonic() < until:
            if self.closing and not logged:
                logged = True
                self._sweep.log(f"still closing MLflow and Ray; this ends within {_LIMIT_S:g} s")
            if not self.closing:  # what was raised at the first signal was swallowed: by a destructor, say
                os.kill(os.getpid(), signal.SIGINT)
        if not self.over.is_set():
            try:
                self._sweep.close(interrupted=True)
            finally:
                end_descendants(_LAST_S / 2)
                os._exit(ExitCode.interrupted)


@contextmanager
def interruptible(sweep: Sweep) -> Iterator[None]:
    """Let SIGTERM interrupt as Ctrl-C does: reported results stay, and the runs are ended."""
    guard = ShutdownGuard(sweep)
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    previous_hook = sys.unraisablehook

    def interrupt(number: int, frame: Any) -> None:
        """Interrupt once: a second Ctrl-C changes nothing when the end has begun."""
        guard.begin()
        if not guard.closing:
            raise KeyboardInterrupt

    def report_unraisable(unraisable: Any) -> None:
        if not isinstance(unraisable.exc_value, KeyboardInterrupt):
            previous_hook(unraisable)

    signal.signal(signal.SIGINT, interrupt)
    sigterm_interrupts()
    sys.unraisablehook = report_unraisable
    try:
        yield
    finally:
        guard.over.set()
        sys.unraisablehook = previous_hook
        for number, handler in before.items():
            signal.signal(number, handler)


def sigterm_interrupts() -> None:
    """Let SIGTERM raise KeyboardInterrupt, as Ctrl-C does."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, frame: os.kill(os.getpid(), signal.SIGINT))
