"""Signals with which other processes end a command."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

ENDS = (signal.SIGTERM, signal.SIGHUP)  # from a service manager, and from a terminal that closes


def on_end(handler: Callable[[int, Any], Any]) -> None:
    """Install a handler for each of these signals. A signal that is ignored, as under `nohup`, stays ignored."""
    for number in ENDS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)
