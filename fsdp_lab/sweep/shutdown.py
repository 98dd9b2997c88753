"""The first interrupt and what follows: whatever hangs, the driver has recorded what it knows and is gone in time."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from fsdp_lab.engine.cluster import end_descendants
from fsdp_lab.engine.rendezvous import end_meetings
from fsdp_lab.status import ExitCode

_LIMIT_S = 8.0  # then what hangs is left behind


class Closable(Protocol):
    """The sweep, as far as its end is concerned."""

    @property
    def closed(self) -> bool: ...

    def say(self, text: str) -> None: ...

    def close(self, interrupted: bool) -> ExitCode: ...


class Deadline:
    """From the first interrupt on: whatever hangs, this process has recorded what it knows and is gone in time."""

    def __init__(self, sweep: Closable) -> None:
        self._sweep = sweep
        self._begun = False
        self.over = threading.Event()

    @property
    def closing(self) -> bool:
        return self.over.is_set() or self._sweep.closed

    def begin(self) -> None:
        if not self._begun:
            self._begun = True
            threading.Thread(target=self._wait, name="deadline", daemon=True).start()

    def _wait(self) -> None:
        until, told = time.monotonic() + _LIMIT_S, False
        while not self.over.wait(2.0) and time.monotonic() < until:
            if self.closing and not told:
                told = True
                self._sweep.say(f"MLflow and Ray are still being told; it ends within {_LIMIT_S:g} s")
            if not self.closing:  # what was raised at the first signal was swallowed: by a destructor, say
                os.kill(os.getpid(), signal.SIGINT)
        if not self.over.is_set():
            try:
                self._sweep.close(interrupted=True)
            finally:
                end_descendants()
                end_meetings()
                os._exit(ExitCode.interrupted)


@contextmanager
def interruptible(sweep: Closable) -> Iterator[None]:
    """SIGTERM interrupts as Ctrl-C does: what was reported stays, and the runs are ended."""
    deadline = Deadline(sweep)
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    told_of_swallowed = sys.unraisablehook

    def interrupt(number: int, frame: Any) -> None:
        """People press Ctrl-C twice: when the end has begun, that changes nothing."""
        deadline.begin()
        if not deadline.closing:
            raise KeyboardInterrupt

    def tell(unraisable: Any) -> None:
        if not isinstance(unraisable.exc_value, KeyboardInterrupt):
            told_of_swallowed(unraisable)

    signal.signal(signal.SIGINT, interrupt)
    sigterm_interrupts()
    sys.unraisablehook = tell
    try:
        yield
    finally:
        deadline.over.set()
        sys.unraisablehook = told_of_swallowed
        for number, handler in before.items():
            signal.signal(number, handler)


def sigterm_interrupts() -> None:
    """Let SIGTERM do what Ctrl-C does."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, frame: os.kill(os.getpid(), signal.SIGINT))
