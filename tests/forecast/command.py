"""`python -m fsdp_lab.forecast` in this process, grids too: a process of their pool would first
import PyTorch. And what such a process answers in tests of the pool: it imports this."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

from fsdp_lab.commands import plan
from fsdp_lab.commands.forecast import main
from fsdp_lab.forecast import run
from tests.workloads.user.project import importable


@contextmanager
def answered_here(interrupt_after: int | None = None, by_signal: bool = False) -> Iterator[None]:
    """Let forecasts be made in this process, which after so many of a grid is interrupted, or gets SIGTERM."""

    def answer_here(requests: dict[str, run.Request], _: int, note: Callable[..., None], stop: object) -> None:
        for number, (key, request) in enumerate(requests.items()):
            if number == interrupt_after:
                if by_signal:
                    signal.raise_signal(signal.SIGTERM)
                raise KeyboardInterrupt
            answer: Future[Any] = Future()
            answer.set_result(run._answer(request))
            note(key, answer)

    with mock.patch.dict(os.environ), mock.patch.object(run, "_in_pool", answer_here):
        yield


def plan_here(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m fsdp_lab.plan` so; a grid of it has real processes."""
    return forecast_here(folder, *words, command=plan.main)


def forecast_here(
    folder: Path, *words: str, interrupt_after: int | None = None, command: Callable[[], int] = main
) -> subprocess.CompletedProcess[str]:
    """Run the command in a folder, where a user's modules are importable."""
    out, err = io.StringIO(), io.StringIO()
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        with (
            importable(folder),
            redirect_stdout(out),
            redirect_stderr(err),
            answered_here(interrupt_after, by_signal=True),
            mock.patch.object(sys, "argv", ["fsdp_lab.forecast", *words]),
        ):
            code = command()
    finally:
        signal.signal(signal.SIGTERM, on_sigterm)
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def answer(question: str) -> int:
    """Return the id of the process, which first does what is asked for."""
    match question.split():
        case ["sleep", seconds]:
            time.sleep(float(seconds))
        case ["signal", number]:
            os.kill(os.getpid(), int(number))
        case ["leave", status]:
            os._exit(int(status))
    return os.getpid()
