"""Commands in children of one process that has imported what they need: one starts within milliseconds, not seconds.

`python -m tests.forked` reads a line of JSON from standard input, `[[folder, [module, word, ...], environment,
seconds], ...]`, and answers each command with two lines, `[number, process]` and, as it ends, `[number, exit status,
output, errors]`. A command is `python -m module word ...` in all but what it has imported already: its folder,
environment, `__main__`, `sys.path` and its end, with all that is registered for that, are a process's of its own.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any, NoReturn

_LIMIT_S = 300
# What the commands import while they run. Not Ray, which reads its environment as it is imported.
_IMPORTED = (
    "fsdp_lab.__main__", "fsdp_lab.report.__main__", "fsdp_lab.forecast.__main__", "mlflow", "mlflow.entities",
    "mlflow.store.tracking.sqlalchemy_store", "plotly.graph_objects", "plotly.io", "plotly.offline", "scipy.stats",
    "torch.distributed.checkpoint", "fsdp_lab.training", "fsdp_lab.sweep.start", "fsdp_lab.sweep.multirun",
    "fsdp_lab.sweep.executors.inline", "fsdp_lab.sweep.sweep_data", "fsdp_lab.workloads.vision.mlp",
    "fsdp_lab.workloads.vision.vit", "fsdp_lab.workloads.vision.digits", "hydra_plugins.fsdp_lab_sweeper.sweeper",
)  # fmt: skip
# One thread for OpenMP: two that wait for each other on a busy core lose a factor of ten. MLflow reads its own as it is
# imported, and would start a thread to tell its makers.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MLFLOW_DISABLE_TELEMETRY": "true"}


@dataclass(frozen=True)
class Done:
    """How a command ended: its exit status (negative: the signal that ended it) and what it printed."""

    code: int
    out: str
    err: str

    @property
    def output(self) -> str:
        return self.out + self.err


class Commands:
    """Runs commands side by side, each in a fork of one process that is started when this is entered."""

    def __init__(self, imported: Sequence[str] = _IMPORTED) -> None:
        self._imported = imported

    def __enter__(self) -> Commands:
        command = [sys.executable, "-m", "tests.forked", *self._imported]
        environment = {**os.environ, **_ENVIRONMENT}
        self._server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        return self

    def __exit__(self, *error: object) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()

    def run(
        self,
        jobs: Sequence[tuple[Path, Sequence[str]]],
        environment: Mapping[str, str] | None = None,
        seconds: float = _LIMIT_S,
    ) -> Iterator[tuple[int, Done]]:
        """Run `module words...` in a folder, for each job; give its number and how it ended, as they end.

        Args:
            environment: of the commands; default: this process's. seconds: after so many SIGALRM ends one.
        """
        self._ask(jobs, environment, seconds)
        for _ in range(2 * len(jobs)):
            number, *answer = self._answer()
            if len(answer) == 3:
                yield number, Done(*answer)

    def run_and_kill(self, folder: Path, words: Sequence[str], when: Callable[[], bool]) -> Done:
        """Run one command, and kill it as soon as something holds."""
        self._ask([(folder, words)])
        pid = self._answer()[1]
        while not when():
            time.sleep(0.001)
        os.kill(pid, signal.SIGKILL)
        return Done(*self._answer()[1:])

    def _ask(
        self,
        jobs: Sequence[tuple[Path, Sequence[str]]],
        environment: Mapping[str, str] | None = None,
        seconds: float = _LIMIT_S,
    ) -> None:
        assert self._server.stdin is not None
        given = dict(os.environ if environment is None else environment)
        asked = [[str(folder), list(words), given, seconds] for folder, words in jobs]
        self._server.stdin.write(json.dumps(asked) + "\n")
        self._server.stdin.flush()

    def _answer(self) -> list[Any]:
        assert self._server.stdout is not None
        answer: list[Any] = json.loads(self._server.stdout.readline())
        return answer


def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    """What Python and the dynamic linker read as a process starts: too late for a fork."""
    return {name: value for name, value in environment.items() if name.startswith(("PYTHON", "LD_"))}


_AT_START = _read_at_start(os.environ)


@cache
def _own(imported: Sequence[str]) -> Commands:
    commands = Commands(imported).__enter__()
    atexit.register(commands.__exit__)
    return commands


def run(
    folder: Path,
    *words: str,
    seconds: float = _LIMIT_S,
    environment: Mapping[str, str] | None = None,
    imported: Sequence[str] = _IMPORTED,
) -> subprocess.CompletedProcess[str]:
    """`python -m <words>`, or `python <words>` where the first is -c, in a folder and in an environment, by default
    this process's, to its end. In a process of its own where the environment has what is read as one starts.

    Args:
        imported: the modules that it finds imported.

    Raises:
        TimeoutExpired: it ran for longer than that.
    """
    given = dict(os.environ if environment is None else environment)
    if _read_at_start(given) != _AT_START:
        command = [sys.executable, *([] if words[0] == "-c" else ["-m"]), *words]
        return subprocess.run(
            command, cwd=folder, env=given, capture_output=True, text=True, timeout=seconds, check=False
        )
    try:
        ((_, done),) = _own(imported).run([(folder, words)], given, seconds)
    except BaseException:
        _own.cache_clear()  # an answer that is still to come would be taken for the next one's
        raise
    if done.code == -signal.SIGALRM:
        raise subprocess.TimeoutExpired(words, seconds, done.out, done.err)
    return subprocess.CompletedProcess(words, done.code, done.out, done.err)


@dataclass(frozen=True)
class _Running:
    """A command that runs, and the files that it prints to."""

    number: int
    out: IO[bytes]
    err: IO[bytes]

    def printed(self) -> Iterator[str]:
        for file in (self.out, self.err):
            with file:
                file.seek(0)
                yield file.read().decode(errors="replace")


def serve() -> None:
    """Answer every job that standard input names, as many at a time as there are cores."""
    for name in sys.argv[1:]:
        importlib.import_module(name)
    assert "ray" not in sys.modules, "it has read the environment of this process, not that of a command"
    gc.freeze()  # what is not looked at need not be copied
    for batch in sys.stdin:
        running: dict[int, _Running] = {}
        for number, (folder, words, environment, seconds) in enumerate(json.loads(batch)):
            job = _Running(number, tempfile.TemporaryFile(), tempfile.TemporaryFile())  # noqa: SIM115 - `printed` does
            if pid := os.fork():
                running[pid] = job
                print(json.dumps([number, pid]), flush=True)
            else:
                signal.setitimer(signal.ITIMER_REAL, seconds)
                _command(folder, words, environment, job)
            if len(running) >= (os.cpu_count() or 1):
                _answer(running)
        while running:
            _answer(running)


def _answer(running: dict[int, _Running]) -> None:
    """Wait for the next command that ends, and say how it did."""
    pid, status = os.wait()
    job = running.pop(pid)
    print(json.dumps([job.number, os.waitstatus_to_exitcode(status), *job.printed()]), flush=True)


def _command(folder: str, words: Sequence[str], environment: Mapping[str, str], job: _Running) -> NoReturn:
    """Be the command, and end with it."""
    os.chdir(folder)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(job.out.fileno(), 1)
    os.dup2(job.err.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # it is looked for in the environment
    # What a process of its own has not got, and what it runs itself.
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests" or name == f"{words[0]}.__main__"]:
        del sys.modules[name]
    sys.path[0] = os.getcwd()  # as `python -m` puts it
    sys.argv = list(words)
    try:
        if words[0] == "-c":
            sys.argv[:2] = ["-c"]
            exec(words[1], {"__name__": "__main__"})
        else:
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        _end(None)
    except SystemExit as end:
        _end(end.code)
    except BaseException:  # noqa: BLE001 - as Python ends with it
        sys.excepthook(*sys.exc_info())
        _end(1)


def _end(code: Any) -> NoReturn:
    """End as Python does, but for taking apart what was imported, which takes seconds and is not heard of."""
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


if __name__ == "__main__":
    serve()
    os._exit(0)
