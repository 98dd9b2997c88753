"""Processes that each answer one question at a time, within a limit, and can be killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, Self

_START = "import sys; _, end, *sys.path = sys.argv; from fsdp_lab.forecast.pool import serve; serve(int(end))"
_END_S = 5.0  # for a killed process to end


class NoAnswerError(Exception):
    """What happened to the process with the question: text to follow "its process"."""


class LateError(NoAnswerError):
    """It exceeded the limit. Another try would, too."""


class Pool:
    """Calls `answer(question)` in its own processes. Use it as a context, which kills them at its end.

    A process starts when it is needed and serves until one of its answers fails. It ends with this process, however
    this one ends. A future raises `NoAnswerError` if its process died or did not start, and `LateError` if
    it exceeded the limit; other questions are not affected.
    """

    def __init__(self, answer: Callable[[Any], Any], num_processes: int, limit_s: float) -> None:
        """Make a pool; processes start with the first questions.

        Args:
            answer: a function of a module, which handles its own errors.
            num_processes: the most processes.
            limit_s: seconds for each answer, including imports.
        """
        self._answer, self._limit_s = answer, limit_s
        self._threads = ThreadPoolExecutor(num_processes, thread_name_prefix="pool")  # each waits for one process
        self._lock = threading.Lock()
        self._children: list[_Child] = []
        self._idle: list[_Child] = []
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the processes: running questions raise `NoAnswerError`, waiting ones are cancelled."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._closed = True
            for child in self._children:
                child.kill()
        self._threads.shutdown()

    def submit(self, question: Any) -> Future[Any]:
        """Return at once; the answer comes in its turn."""
        return self._threads.submit(self._ask, question)

    def _ask(self, question: Any) -> Any:
        child = self._take()
        try:
            answer = child.ask(question, self._limit_s)
        except BaseException:
            child.kill()
            raise
        with self._lock:
            self._idle.append(child)
        return answer

    def _take(self) -> _Child:
        with self._lock:
            if self._closed:
                raise CancelledError
            if not self._idle:
                self._children.append(_Child(self._answer))
                return self._children[-1]
            return self._idle.pop()


class _Child:
    """A process, and our end of the pipe to it.

    `multiprocessing` would run the caller's script again in each process, so a script that forecasts would need a
    guard.
    """

    def __init__(self, answer: Callable[[Any], Any]) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        end = str(theirs.fileno())
        command = [sys.executable, "-c", _START, end, *(path or os.getcwd() for path in sys.path)]
        # The parent handles Ctrl-C. A process inherits blocked signals: it could not block them early enough itself.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process = subprocess.Popen(command, pass_fds=[int(end)])
        except OSError as error:
            raise NoAnswerError(f"did not start ({error})") from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            theirs.close()  # so that the pipe closes when the process ends
        with suppress(OSError):  # it has ended; `ask` notices that
            self._pipe.send(answer)

    def ask(self, question: Any, limit_s: float) -> Any:
        try:
            self._pipe.send(question)
            if self._pipe.poll(limit_s):
                return self._pipe.recv()
        except (EOFError, OSError):
            self._wait()
            raise NoAnswerError(_how(self._process.returncode)) from None
        raise LateError(f"did not answer within {limit_s:g} s")

    def kill(self) -> None:
        self._process.kill()
        self._wait()

    def _wait(self) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)


def _how(exit_code: int | None) -> str:
    if exit_code == -signal.SIGKILL:
        return "was killed, most likely because memory ran out"
    with suppress(ValueError):
        if exit_code is not None and exit_code < 0:
            return f"ended by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}"


def serve(end: int) -> None:
    """Answer questions from a pipe, and end with the process that asks them.

    Args:
        end: of the pipe, a file descriptor. The first message is the function that answers.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe = Connection(end)
    answer = pipe.recv()
    questions: SimpleQueue[Any] = SimpleQueue()

    def read() -> None:
        try:
            with suppress(EOFError, OSError):
                while True:
                    questions.put(pipe.recv())
        finally:
            os._exit(1)

    threading.Thread(target=read, daemon=True).start()
    while True:
        pipe.send(answer(questions.get()))
