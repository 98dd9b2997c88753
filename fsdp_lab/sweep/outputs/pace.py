"""How often something is done that takes the longer, the more trials there are."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

_EVERY_S = 1.0
_SHARE = 0.02  # of the driver's time, at most


class Pace:
    """Once a second, and never more than a fiftieth of the time."""

    def __init__(self) -> None:
        self._due_at = 0.0

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._due_at

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Measure the work inside; the next run is due later in proportion."""
        begun = time.monotonic()
        try:
            yield
        finally:
            now = time.monotonic()
            self._due_at = now + max(_EVERY_S, (now - begun) * (1 / _SHARE - 1))
