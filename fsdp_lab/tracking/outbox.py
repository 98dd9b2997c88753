"""Writes to a store that may be away: in order, each once, and none is lost while this process lives."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from fsdp_lab.tracking.tags import one_line

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0  # between two attempts while the store is away
# An expired token and a proxy in between are mended by people, and until then the writes wait.
_AWAY = (401, 403, 408, 429)


@dataclass
class _Write:
    """One write that waits its turn. `do` gets whether it was tried before."""

    what: str
    run: str
    do: Callable[[bool], None]
    tried: bool = False


class Outbox:
    """Sends writes in the order in which they were put.

    A write that the store refuses is reported once for each kind, and left out. While the store does not answer,
    writes wait in memory. One thread sends at a time: while that hangs, what another one puts waits behind it.

    Args:
        uri: of the store, for messages; without credentials.
    """

    def __init__(self, uri: str, on_problem: Callable[[str], None]) -> None:
        self._uri, self._on_problem = uri, on_problem
        self._waiting: deque[_Write] = deque()
        self._sending = threading.Lock()
        self._silent_until = 0.0  # time.monotonic(): no attempt before it
        self._pause_s = _FIRST_PAUSE_S
        self._told: set[str] = set()
        self._refused: set[str] = set()

    def put(self, what: str, run: str, do: Callable[[bool], None]) -> None:
        """Send a write now, or as soon as those before it are sent.

        Args:
            what: the kind of write, for messages.
            run: whose it is, for `refused`.
            do: makes the write; gets whether an attempt before may have got through.
        """
        self._waiting.append(_Write(what, run, do))
        self._send()

    def refused(self, run: str) -> bool:
        """Whether the store has refused a write of the run."""
        return run in self._refused

    def settle(self, limit_s: float) -> int:
        """Send what waits, for at most so long; returns how many writes still wait."""
        until = time.monotonic() + limit_s
        if self._waiting and limit_s > 0:
            self._on_problem(f"waits up to tracking.patience_s={limit_s:g} s for the MLflow store to answer")
        while self._waiting:
            self._silent_until = 0.0
            self._send()
            if not self._waiting or time.monotonic() > until:
                break
            time.sleep(min(1.0, limit_s))
        return len(self._waiting)

    def tell(self, kind: str, message: str) -> None:
        """Report a problem, once for each kind."""
        if kind not in self._told:
            self._told.add(kind)
            self._on_problem(message)

    def _send(self) -> None:
        """Do what waits, in order, unless another thread is at it."""
        if self._sending.acquire(blocking=False):
            try:
                while self._waiting and time.monotonic() >= self._silent_until:
                    if not self._try(self._waiting[0]):
                        return
                    self._waiting.popleft()
                    self._pause_s = _FIRST_PAUSE_S
                    if not self._waiting and "away" in self._told:
                        self._told.discard("away")
                        self._on_problem("the MLflow store answers again; what waited was sent")
            finally:
                self._sending.release()

    def _try(self, write: _Write) -> bool:
        """Whether the write is done with; False where the store is away and left alone for a while."""
        try:
            write.do(write.tried)
        except Exception as error:  # noqa: BLE001 (no failure of the record may end the sweep)
            # Of urllib3's chain of wrappers, only what stands last says something.
            reason = one_line(str(error).rpartition("Caused by ")[2], 300) or type(error).__name__
            if _is_away(error):
                write.tried = True
                self._silent_until = time.monotonic() + self._pause_s
                self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
                self.tell(
                    "away",
                    f"tracking.uri={self._uri}: the MLflow store does not answer ({reason}). The trials go on and keep "
                    "their results in their folders; they are sent when it answers again.",
                )
                return False
            self._refused.add(write.run)
            self.tell(write.what, f"tracking.uri={self._uri}: MLflow did not take {write.what} ({reason}).")
        except BaseException:  # an interrupt: the write may have got through
            write.tried = True
            raise
        return True


def _is_away(error: Exception) -> bool:
    """Whether the store, or its disk or network, failed; otherwise it answered and refused this one write."""
    from mlflow.exceptions import MlflowException

    if isinstance(error, MlflowException):
        status = error.get_http_status_code()
        return status >= 500 or status in _AWAY or error.error_code == "ENDPOINT_NOT_FOUND"
    return isinstance(error, OSError)
