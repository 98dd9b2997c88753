"""Writes to a store that may be away: in order, each once, and none is lost while this process lives."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from fsdp_lab.tracking.tags import one_line

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0  # between two attempts while the store is away
# An expired token and a proxy in between are mended by people, and until then the writes wait.
_AWAY = (401, 403, 408, 429)


class _Attempt:
    """A write that is being made, in a thread of its own.

    Ctrl-C reaches the main thread only. An interrupted write to SQLite would leave the database locked, and the writes
    that end the runs would wait for it in vain.
    """

    def __init__(self) -> None:
        self._begun = threading.Lock()
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def _make(self, write: _Write) -> None:
        if not self._begun.acquire(blocking=False):  # an interrupt came between the thread's start and the wait
            return
        try:
            write.do(write.tried)
        except BaseException as error:  # noqa: BLE001 (the thread that waits gets it)
            self._error = error
        finally:
            self._ended.set()

    def make(self, write: _Write) -> None:
        """Begin the write if need be, wait for it, and raise what it raises. An interrupt ends the wait only."""
        if not self._begun.locked():
            try:
                threading.Thread(target=self._make, args=(write,), name="mlflow", daemon=True).start()
            except RuntimeError:  # the machine's or the user's limit of threads
                self._make(write)
        self._ended.wait()
        if self._error is not None:
            if not isinstance(self._error, Exception):  # nobody drops the write, so the next call makes it again
                write.tried, write.attempt = True, _Attempt()
            raise self._error


@dataclass
class _Write:
    """One write that waits its turn. `do` gets whether it was tried before."""

    what: str
    run: str
    do: Callable[[bool], None]
    tried: bool = False
    attempt: _Attempt = field(default_factory=_Attempt)


class Outbox:
    """Sends writes in the order in which they were put.

    A write that the store refuses is reported once for each kind, and dropped. While the store does not answer, writes
    wait in memory. One thread sends at a time: while it hangs, writes of other threads wait behind it. An interrupt
    ends the wait for a write, not the write; the next call waits for it again.

    Args:
        uri: of the store, for messages; without credentials.
        on_problem: gets a message about a problem.
    """

    def __init__(self, uri: str, on_problem: Callable[[str], None]) -> None:
        self._uri, self._on_problem = uri, on_problem
        self._waiting: deque[_Write] = deque()
        self._sending = threading.Lock()
        self._silent_until = 0.0  # time.monotonic(): no attempt before it
        self._pause_s = _FIRST_PAUSE_S
        self._reported: set[str] = set()
        self._refused: set[str] = set()

    def put(self, what: str, run: str, do: Callable[[bool], None]) -> None:
        """Send a write now, or as soon as those before it are sent.

        Args:
            what: the kind of write, for messages.
            run: the run that it belongs to, for `refused`.
            do: makes the write; gets whether an earlier attempt may have succeeded.
        """
        self._waiting.append(_Write(what, run, do))
        self._send()

    def refused(self, run: str) -> bool:
        """Whether the store has refused a write of the run."""
        return run in self._refused

    def settle(self, limit_s: float) -> int:
        """Send waiting writes for at most so many seconds, and return how many still wait."""
        until = time.monotonic() + limit_s
        if self._waiting and limit_s > 0:
            self._on_problem(f"waiting up to tracking.patience_s={limit_s:g} s for the MLflow store to answer")
        while self._waiting:
            self._silent_until = 0.0
            self._send()
            if not self._waiting or time.monotonic() > until:
                break
            time.sleep(min(1.0, limit_s))
        return len(self._waiting)

    def report_problem(self, kind: str, message: str) -> None:
        """Report a problem, once for each kind."""
        if kind not in self._reported:
            self._reported.add(kind)
            self._on_problem(message)

    def _send(self) -> None:
        """Send waiting writes in order, unless another thread does."""
        if self._sending.acquire(blocking=False):
            try:
                while self._waiting and time.monotonic() >= self._silent_until:
                    if not self._try(self._waiting[0]):
                        return
                    self._waiting.popleft()
                    self._pause_s = _FIRST_PAUSE_S
                    if not self._waiting and "away" in self._reported:
                        self._reported.discard("away")
                        self._on_problem("the MLflow store answers again; the delayed writes were sent")
            finally:
                self._sending.release()

    def _try(self, write: _Write) -> bool:
        """Return whether the write is done; False if the store is away and not tried for a while."""
        try:
            write.attempt.make(write)
        except Exception as error:  # noqa: BLE001 (no failure of the record may end the sweep)
            # Of urllib3's chain of wrappers, only what stands last says something.
            reason = one_line(str(error).rpartition("Caused by ")[2], 300) or type(error).__name__
            if _is_away(error):
                write.tried, write.attempt = True, _Attempt()
                self._silent_until = time.monotonic() + self._pause_s
                self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
                self.report_problem(
                    "away",
                    f"tracking.uri={self._uri}: the MLflow store does not answer ({reason}). Trials continue and keep "
                    "their results in their folders. They are sent when the store answers again.",
                )
                return False
            self._refused.add(write.run)
            self.report_problem(write.what, f"tracking.uri={self._uri}: MLflow refused {write.what} ({reason}).")
        return True


def _is_away(error: Exception) -> bool:
    """Whether the store, or its disk or network, failed; otherwise it answered and refused this one write."""
    from mlflow.exceptions import MlflowException

    if isinstance(error, MlflowException):
        status = error.get_http_status_code()
        return status >= 500 or status in _AWAY or error.error_code == "ENDPOINT_NOT_FOUND"
    return isinstance(error, OSError)
