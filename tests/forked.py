"""Commands in children of one process that has imported what they need: one starts within milliseconds, not seconds.

`python -m tests.forked` reads a line of JSON from standard input, `[[folder, [program, word, ...]], ...]`, and answers
each command with two lines, `[number, process]` and, as it ends, `[number, exit status, output]`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

_LIMIT_S = 100
_MAINS = {"fsdp_lab": "fsdp_lab.__main__", "fsdp_lab.report": "fsdp_lab.report.__main__"}
# What the commands import while they run.
_IMPORTED = (
    *_MAINS.values(), "mlflow", "mlflow.entities", "mlflow.store.tracking.sqlalchemy_store", "plotly.graph_objects",
    "plotly.io", "plotly.offline", "scipy.stats", "sklearn.datasets", "torch.distributed.checkpoint",
    "fsdp_lab.training", "fsdp_lab.sweep.start", "fsdp_lab.sweep.multirun", "fsdp_lab.sweep.executors.inline",
    "fsdp_lab.sweep.report", "fsdp_lab.workloads.vision.mlp", "fsdp_lab.workloads.vision.digits",
    "hydra_plugins.fsdp_lab_sweeper.sweeper",
)  # fmt: skip


@dataclass(frozen=True)
class Done:
    """How a command ended: its exit status (negative: the signal that ended it) and what it printed."""

    code: int
    told: str


class Commands:
    """Runs commands side by side, each in a fork of one process that is started when this is entered."""

    def __enter__(self) -> Commands:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.forked"]
        self._server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        return self

    def __exit__(self, *error: object) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()

    def run(self, jobs: Sequence[tuple[Path, Sequence[str]]]) -> Iterator[tuple[int, Done]]:
        """Run `program words...` in a folder, for each job; give its number and how it ended, as they end."""
        self._ask(jobs)
        for _ in range(2 * len(jobs)):
            number, *answer = self._answer()
            if len(answer) == 2:
                yield number, Done(*answer)

    def run_and_kill(self, folder: Path, words: Sequence[str], when: Callable[[], bool]) -> Done:
        """Run one command, and kill it as soon as something holds."""
        self._ask([(folder, words)])
        pid = self._answer()[1]
        while not when():
            time.sleep(0.001)
        os.kill(pid, signal.SIGKILL)
        return Done(*self._answer()[1:])

    def _ask(self, jobs: Sequence[tuple[Path, Sequence[str]]]) -> None:
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps([[str(folder), list(words)] for folder, words in jobs]) + "\n")
        self._server.stdin.flush()

    def _answer(self) -> list[Any]:
        assert self._server.stdout is not None
        answer: list[Any] = json.loads(self._server.stdout.readline())
        return answer


def serve() -> None:
    """Answer every job that standard input names, as many at a time as there are cores."""
    for name in _IMPORTED:
        importlib.import_module(name)
    for batch in sys.stdin:
        running: dict[int, tuple[int, IO[bytes]]] = {}
        for number, (folder, words) in enumerate(json.loads(batch)):
            out = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the answer
            if pid := os.fork():
                running[pid] = (number, out)
                print(json.dumps([number, pid]), flush=True)
            else:
                _command(folder, words, out)
            if len(running) >= (os.cpu_count() or 1):
                _answer(running)
        while running:
            _answer(running)


def _answer(running: dict[int, tuple[int, IO[bytes]]]) -> None:
    """Wait for the next command that ends, and say how it did."""
    pid, status = os.wait()
    number, out = running.pop(pid)
    with out:
        out.seek(0)
        told = out.read().decode(errors="replace")
    print(json.dumps([number, os.waitstatus_to_exitcode(status), told]), flush=True)


def _command(folder: str, words: Sequence[str], out: IO[bytes]) -> None:
    """Be the command, and end with it."""
    code: Any = 1
    try:
        os.chdir(folder)
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
        signal.alarm(_LIMIT_S)
        sys.argv = list(words)
        code = importlib.import_module(_MAINS[words[0]]).main()
    except SystemExit as end:
        code = end.code
    except BaseException:  # noqa: BLE001 - as Python ends with it
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code or 0)


if __name__ == "__main__":
    serve()
