"""Processes that each answer one question at a time, within a limit, and can be killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

Question = TypeVar("Question")
Answer = TypeVar("Answer")

_END_S = 5.0  # for a process that was killed, to be gone


class NoAnswerError(Exception):
    """What happened to the process with the question: the end of a sentence that begins with "its process"."""


class Pool(Generic[Question, Answer]):
    """Calls `answer(question)` in its own processes. Use it as a context, which kills them at its end.

    A process starts when it is needed and serves until one of its answers fails. It ends with this process, however
    this ends. A future raises `NoAnswerError` if its process died, did not start or exceeded the limit; other questions
    are not affected.
    """

    def __init__(self, answer: Callable[[Question], Answer], num_processes: int, limit_s: float) -> None:
        """Make a pool; processes start with the first questions.

        Args:
            answer: a function of a module, which handles its own errors.
            num_processes: at most.
            limit_s: seconds for each answer, including imports.
        """
        self._answer, self._limit_s = answer, limit_s
        self._threads = ThreadPoolExecutor(num_processes, thread_name_prefix="pool")  # each waits for one process
        self._lock = threading.Lock()
        self._children: list[_Child] = []
        self._idle: list[_Child] = []
        self._closed = False

    def __enter__(self) -> Pool[Question, Answer]:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the processes: running questions raise `NoAnswerError`, waiting ones are cancelled."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._closed = True
            for child in self._children:
                child.kill()
        self._threads.shutdown()

    def submit(self, question: Question) -> Future[Answer]:
        """Return at once; the answer comes in its turn."""
        return self._threads.submit(self._ask, question)

    def _ask(self, question: Question) -> Any:
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
                raise NoAnswerError
            if not self._idle:
                self._children.append(_Child(self._answer))
                return self._children[-1]
            return self._idle.pop()


class _Child:
    """A process, and our end of the pipe to it."""

    def __init__(self, answer: Callable[[Any], Any]) -> None:
        # spawn: a fork would take over the threads and locks of Ray and MLflow
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, answer), daemon=True)
        # Ctrl-C is the parent's. A process inherits what its starter blocks: it cannot say so itself early enough.
        resource_tracker.ensure_running()  # which unblocks it again where it is not running yet
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        except OSError as error:
            raise NoAnswerError(f"did not start ({error})") from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            theirs.close()  # so that its end is the end of the pipe

    def ask(self, question: Any, limit_s: float) -> Any:
        try:
            self._pipe.send(question)
            if self._pipe.poll(limit_s):
                return self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(_END_S)
            raise NoAnswerError(_how(self._process.exitcode)) from None
        raise NoAnswerError(f"did not answer within {limit_s:g} s")

    def kill(self) -> None:
        self._process.kill()
        self._process.join(_END_S)


def _how(exit_code: int | None) -> str:
    """Say how a process ended."""
    if exit_code == -signal.SIGKILL:
        return "was killed, most likely because memory ran out"
    with suppress(ValueError):
        if exit_code is not None and exit_code < 0:
            return f"ended by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}"


def _serve(pipe: Connection, answer: Callable[[Any], Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(EOFError):
        while True:
            pipe.send(answer(pipe.recv()))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
