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
from fsdp_lab.machine.signals import ENDS, on_end
from fsdp_lab.sweep.sweep import Sweep

_LIMIT_S = 8.0  # then what hangs is left behind
_LAST_S = 2.0  # of it, for the last work of the deadline's thread


@contextmanager
def interruptible(sweep: Sweep) -> Iterator[None]:
    """Let SIGTERM and SIGHUP interrupt as Ctrl-C does: reported results stay, and the runs are ended."""
    over = threading.Event()
    before = {number: signal.getsignal(number) for number in (*ENDS, signal.SIGINT)}
    previous_hook = sys.unraisablehook

    def interrupt(number: int, frame: Any) -> None:
        """Interrupt once: a second Ctrl-C changes nothing when the end has begun."""
        if sweep.ends_by is None:
            sweep.ends_by = time.monotonic() + _LIMIT_S - _LAST_S
            threading.Thread(target=_exit_in_time, args=(sweep, over), name="deadline", daemon=True).start()
        if not over.is_set() and sweep.ending is None:
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
        over.set()
        sys.unraisablehook = previous_hook
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit_in_time(sweep: Sweep, over: threading.Event) -> None:
    until = sweep.ends_by or 0.0
    while not over.wait(max(0.0, min(2.0, until - time.monotonic()))) and time.monotonic() < until:
        if sweep.ending is None:  # something swallowed the first signal's exception, for example a destructor
            os.kill(os.getpid(), signal.SIGINT)
    if not over.is_set():
        try:
            sweep.close(interrupted=True)
        finally:
            end_descendants(_LAST_S / 2)
            os._exit(ExitCode.interrupted)


def sigterm_interrupts() -> None:
    """Let SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does."""
    on_end(lambda number, frame: os.kill(os.getpid(), signal.SIGINT))
