"""Open a page in the user's browser as soon as its server answers: `python -m fsdp_lab.open_page <address>`.

Without a desktop it does nothing, because a browser in the terminal would cover the server's output.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import webbrowser
from urllib.parse import urlsplit

_PATIENCE_S = 60.0  # for a server that starts


def has_desktop() -> bool:
    """Return whether there is a browser with a window, or the user named one in BROWSER."""
    return sys.platform == "darwin" or any(name in os.environ for name in ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY"))


def open_page(address: str, patience_s: float = _PATIENCE_S) -> bool:
    """Open an address once something listens on its port.

    Args:
        address: with a host and a port.
        patience_s: seconds to wait for the port.

    Returns:
        whether a browser was started.
    """
    parts = urlsplit(address)
    until = time.monotonic() + patience_s
    while has_desktop() and time.monotonic() < until:
        try:
            socket.create_connection((parts.hostname or "", parts.port or 80), timeout=1).close()
        except OSError:
            time.sleep(0.2)
        else:
            return webbrowser.open(address)
    return False


if __name__ == "__main__":
    open_page(sys.argv[1])
