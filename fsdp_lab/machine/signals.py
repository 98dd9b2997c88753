"""Signals by which others end a command."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

ENDS = (signal.SIGTERM, signal.SIGHUP)  # of a manager, and of a terminal that closes


def on_end(handler: Callable[[int, Any], Any]) -> None:
    """Call a handler at each of these signals. One that is ignored, as by `nohup`, stays ignored."""
    for number in ENDS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)
