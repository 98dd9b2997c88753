"""Commands in forks of one process that has imported what they need: one starts within milliseconds, not seconds.

The first test that needs it starts the server, and all workers of pytest share it. `python -m tests.forked SOCKET`
reads a line of JSON from each connection, `{"jobs": [[folder, [module, word, ...]], ...], "environment": {...},
"seconds": ..., "together": ...}`. It answers each job with two lines: `[number, process]`, and as it ends `[number,
exit status, output, errors]`. A command is `python -m module word ...` in all but what it has imported already: its
folder, environment, `__main__`, `sys.path` and its end, with all that is registered for that, are its own.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any, NoReturn

_ROOT = Path(__file__).resolve().parent.parent
_LIMIT_S = 300
_START_S = 180  # of the server: half a minute of imports where other tests use the cores
# What commands and ranks import while they run. Not Ray, which reads its environment as it is imported.
_IMPORTED = (
    "fsdp_lab.commands.main", "fsdp_lab.commands.report", "fsdp_lab.commands.forecast", "mlflow", "mlflow.entities",
    "mlflow.store.tracking.sqlalchemy_store", "plotly.graph_objects", "plotly.io", "plotly.offline", "scipy.stats",
    "torch.distributed.checkpoint", "torch.utils.serialization", "torchvision.models", "yaml", "pytest",
    "fsdp_lab.training", "fsdp_lab.training.__main__", "fsdp_lab.machine.cpu_contention", "fsdp_lab.sweep.start",
    "fsdp_lab.sweep.command", "fsdp_lab.sweep.executors.inline", "fsdp_lab.sweep.sweep_data",
    "fsdp_lab.workloads.vision.classification", "fsdp_lab.workloads.vision.mlp",
    "fsdp_lab.workloads.vision.models", "fsdp_lab.workloads.vision.digits", "hydra_plugins.fsdp_lab_sweeper.sweeper",
)  # fmt: skip
_AT_IMPORT = dict(os.environ)  # before any test changes it
# One thread for OpenMP: two that wait for each other on a busy core lose a factor of ten. MLflow reads its own as it is
# imported, and would start a thread that reports to its makers.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MLFLOW_DISABLE_TELEMETRY": "true"}


@cache
def shared_folder() -> Path:
    """Return the folder that all workers of a test run share, removed at its end. The first process makes it."""
    if "FSDP_LAB_TESTS" not in os.environ:
        os.environ["FSDP_LAB_TESTS"] = tempfile.mkdtemp(prefix="fsdp_lab_tests_")
        os.environ["FSDP_LAB_TESTS_PID"] = str(os.getpid())
        atexit.register(shutil.rmtree, os.environ["FSDP_LAB_TESTS"], ignore_errors=True)
    return Path(os.environ["FSDP_LAB_TESTS"])


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
    """Runs commands side by side, each in a fork of the server."""

    def __init__(self) -> None:
        self._connection = _connect().makefile("rw")

    def __enter__(self) -> Commands:
        return self

    def __exit__(self, *error: object) -> None:
        self._connection.close()

    def run(
        self,
        jobs: Sequence[tuple[Path, Sequence[str]]],
        environment: Mapping[str, str] | None = None,
        seconds: float = _LIMIT_S,
        together: bool = False,
    ) -> Iterator[tuple[int, Done]]:
        """Run `module words...` in a folder, for each job; yield its number and how it ended, as they end.

        Args:
            environment: of the commands; default: this process's. seconds: after so many SIGALRM ends one.
            together: all at the same time, and if one fails the others are killed; else one a core.
        """
        self._ask(jobs, environment, seconds, together)
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
        together: bool = False,
    ) -> None:
        given = dict(os.environ if environment is None else environment)
        assert _read_at_start(given) == _AT_START, "too late for a fork: use `run`"
        named = [[str(folder), list(words)] for folder, words in jobs]
        message = {"jobs": named, "environment": given, "seconds": seconds, "together": together}
        self._connection.write(json.dumps(message) + "\n")
        self._connection.flush()

    def _answer(self) -> list[Any]:
        line = self._connection.readline()
        assert line, "the server of commands ended"
        answer: list[Any] = json.loads(line)
        return answer


def _connect() -> socket.socket:
    """Return a connection to the server, which is started where there is none."""
    address = shared_folder() / "commands"
    with (shared_folder() / "commands.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        end = time.monotonic() + _START_S
        if not address.exists():
            command = [sys.executable, "-m", "tests.forked", str(address)]
            environment = {**_AT_IMPORT, **_ENVIRONMENT, **_of_this_run()}
            server = subprocess.Popen(command, cwd=_ROOT, env=environment, start_new_session=True)
        while not address.exists():
            assert server.poll() is None, f"the server of commands ended with {server.returncode}"
            assert time.monotonic() < end, f"the server of commands did not start within {_START_S} s"
            time.sleep(0.05)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(address))
    return connection


def _of_this_run() -> dict[str, str]:
    return {name: os.environ[name] for name in ("FSDP_LAB_TESTS", "FSDP_LAB_TESTS_PID")}


def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what Python and the dynamic linker read as a process starts: too late for a fork."""
    return {name: value for name, value in environment.items() if name.startswith(("PYTHON", "LD_"))}


_AT_START = _read_at_start(os.environ)


@cache
def _own() -> Commands:
    commands = Commands()
    atexit.register(commands.__exit__)
    return commands


def run(
    folder: Path, *words: str, seconds: float = _LIMIT_S, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `python -m <words>`, or `python <words>` where the first is -c, in a folder, to its end.

    In a process of its own where the environment has what is read as one starts.

    Args:
        environment: default: this process's.

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
        ((_, done),) = _own().run([(folder, words)], given, seconds)
    except BaseException:
        _own.cache_clear()  # an answer that is still to come would be read as the next one's
        raise
    if done.code == -signal.SIGALRM:
        late = subprocess.TimeoutExpired(words, seconds, done.out, done.err)
        late.add_note(f"{done.out[-3000:]}\n{done.err[-3000:]}")  # pytest shows it
        raise late
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


def serve(address: str) -> None:
    """Answer all connections, each in a fork of this process, until the test run has ended."""
    import psutil  # here: a GPU machine with PyTorch alone lacks it, and imports this file

    for name in _IMPORTED:
        importlib.import_module(name)
    assert "ray" not in sys.modules, "it has read the environment of this process, not that of a command"
    gc.freeze()  # what is not looked at need not be copied
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no fork waits to be collected
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{address}.new")
    listener.listen()
    listener.settimeout(1.0)
    os.rename(f"{address}.new", address)  # it is there once it answers
    owner = int(os.environ["FSDP_LAB_TESTS_PID"])
    while os.path.exists(address) and psutil.pid_exists(owner):
        with suppress(TimeoutError):
            connection, _ = listener.accept()
            if not os.fork():
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listener.close()
                connection.setblocking(True)
                try:
                    _attend(connection)
                finally:
                    os._exit(0)
            connection.close()
    shutil.rmtree(Path(address).parent, ignore_errors=True)  # where a run was killed


def _attend(client: socket.socket) -> None:
    """Answer one connection until its other side ends."""
    for line in client.makefile("r"):
        message = json.loads(line)
        running: dict[int, _Running] = {}
        at_once = len(message["jobs"]) if message["together"] else os.cpu_count() or 1
        for number, (folder, words) in enumerate(message["jobs"]):
            job = _Running(number, tempfile.TemporaryFile(), tempfile.TemporaryFile())  # noqa: SIM115 - `printed` does
            if pid := os.fork():
                running[pid] = job
                client.sendall((json.dumps([number, pid]) + "\n").encode())
            else:
                os.close(client.fileno())  # what it starts and leaves behind must not keep the connection
                signal.setitimer(signal.ITIMER_REAL, message["seconds"])
                _command(folder, words, message["environment"], job)
            if len(running) >= at_once:
                _answer(running, client, message["together"])
        while running:
            _answer(running, client, message["together"])


def _answer(running: dict[int, _Running], client: socket.socket, together: bool) -> None:
    """Wait for the next command that ends, and report how it did. Without a client that waits, kill them all."""
    while not (ended := os.waitpid(-1, os.WNOHANG))[0]:
        if select.select([client], [], [], 0.01)[0] and not client.recv(1, socket.MSG_PEEK):
            for pid in running:
                os.kill(pid, signal.SIGKILL)
            os._exit(1)
    job = running.pop(ended[0])
    code = os.waitstatus_to_exitcode(ended[1])
    client.sendall((json.dumps([job.number, code, *job.printed()]) + "\n").encode())
    if together and code:
        for other in running:
            os.kill(other, signal.SIGKILL)


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
    """End as Python does, but for taking apart what was imported, which takes seconds and has no effect."""
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


if __name__ == "__main__":
    serve(sys.argv[1])
    os._exit(0)
