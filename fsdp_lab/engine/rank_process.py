"""The process in which a rank trains. Ray's worker starts it, passes on its reports, and outlives it.

Ray's worker does not train itself: its threads would take a twentieth of the speed (`benchmarks/README.md`). On a Ray
that was started here the process is a fork of one that has imported PyTorch (`rank_server.py`), elsewhere a new Python.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fsdp_lab.hardware import RAYLET

SERVER = "FSDP_LAB_RANK_SERVER"  # the address of the process that forks ranks, in the environment of Ray's workers
_FORK_S = 60.0  # for the server to import PyTorch and fork
_SCORE = Path("/proc/self/oom_score_adj")


class RankFailed(RuntimeError):
    """A rank's process ended with an error, or was killed. What happened is in the trial's `failures/`, if known."""


class RankOutOfMemory(RankFailed):
    """A rank's process was killed because the host's memory was almost used up."""


def how_it_ended(status: int) -> str:
    """Return how a process ended that left no error of its own.

    Args:
        status: the exit status; -n: signal n ended it.
    """
    if status == -signal.SIGKILL:
        return "its process ended without an error, as if killed"
    if status < 0:
        with suppress(ValueError):
            return f"its process was ended by signal {-status} ({signal.Signals(-status).name})"
    return f"its process exited with status {status} before the trial ended"


class Channel:
    """Messages between a rank and Ray's worker: a line of JSON each."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._lines = connection.makefile("rb")

    def send(self, **message: Any) -> None:
        """Send a message. Raises OSError if the other side is gone."""
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any] | None:
        """Wait for the next message and return it; None if the other side is gone."""
        with suppress(ConnectionError):
            line = self._lines.readline()
            if line.endswith(b"\n"):
                return dict(json.loads(line))
        return None

    def close(self) -> None:
        """End the connection."""
        self._lines.close()
        self.connection.close()


class RankProcess:
    """A rank's process, seen by Ray's worker.

    Args:
        channel: to it.
        python: the process if it is a child of this one; None: a fork of the server's, which tells how it ended.

    Attributes:
        done: whether the rank says that it has done its work. Code that it calls may end the process before.
        out_of_memory: whether the server killed it because the host's memory was almost used up.
    """

    def __init__(self, channel: Channel, python: subprocess.Popen[bytes] | None) -> None:
        self._channel, self._python, self._status, self.done = channel, python, -int(signal.SIGKILL), False
        self.out_of_memory = False
        self._reaper = threading.Thread(target=self._reap, daemon=True)
        if python is not None:
            self._reaper.start()

    def epochs(self) -> Iterator[float]:
        """Yield each epoch that the rank reports; it waits until the next one is asked for."""
        while (message := self._channel.receive()) is not None:
            if "exit" in message:
                self._status, self.out_of_memory = message["exit"], message["out_of_memory"]
                return
            self.done = self.done or "done" in message
            if "epoch" in message:
                yield message["epoch"]
                with suppress(OSError):  # it was killed: the next message says so
                    self._channel.send(go=True)

    def wait(self) -> int:
        """Return the exit status of a process that reports no more; -n: signal n ended it."""
        if self._python is None:
            return self._status
        self._reaper.join()
        return self._python.wait()

    def end(self) -> None:
        """Kill the process and what it has started, if they are still there."""
        if self._python is not None:
            if self._python.returncode is None:  # else its number may be another's
                end_group(self._python.pid)
            self._reaper.join()
        self._channel.close()  # the server kills a fork whose worker is gone

    def _reap(self) -> None:
        """Wait for the process, end what it has started, and let `epochs` end, whoever else has the channel."""
        assert self._python is not None
        os.waitid(os.P_PID, self._python.pid, os.WEXITED | os.WNOWAIT)
        end_group(self._python.pid)
        self._python.wait()
        with suppress(OSError):
            self._channel.connection.shutdown(socket.SHUT_RD)


@contextmanager
def rank_process(work: Mapping[str, Any], listener: int | None = None) -> Iterator[RankProcess]:
    """Start a rank's process, and end it when the block ends.

    Args:
        work: of the rank, see `rank.run_rank`.
        listener: a socket that the process inherits; None: none.
    """
    environment = {**os.environ, RAYLET: str(os.getppid())}
    message = {"work": work, "path": import_path(), "environment": environment, "oom_score_adj": _read_score()}
    process = (None if listener is not None else _fork(message)) or _spawn(message, listener)
    try:
        yield process
    finally:
        process.end()


def _fork(message: Mapping[str, Any]) -> RankProcess | None:
    """Let the server fork; None if there is none, or it does not answer."""
    address = os.environ.get(SERVER)
    if address is None:
        return None
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(_FORK_S)
        connection.connect(address)
        channel = Channel(connection)
        channel.send(**message)
        if "pid" not in (channel.receive() or {}):
            raise ConnectionError("it could not fork")
        connection.settimeout(None)
        channel.send(go=True)  # a fork that comes too late does nothing
        return RankProcess(channel, None)
    except (OSError, ValueError) as error:
        print(f"fsdp_lab: {address} forks no rank ({error}); the rank starts a new Python", file=sys.stderr)
        connection.close()
        return None


def _spawn(message: Mapping[str, Any], listener: int | None) -> RankProcess:
    """Start a new Python."""
    ours, theirs = socket.socketpair()
    inherited = [theirs.fileno(), *([] if listener is None else [listener])]
    python = subprocess.Popen(
        [sys.executable, "-P", "-m", "fsdp_lab.engine.rank", str(theirs.fileno()), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        pass_fds=inherited,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(message["path"])},  # without the working directory: -P
    )
    theirs.close()
    if listener is not None:
        os.close(listener)
    process = RankProcess(channel := Channel(ours), python)
    with suppress(OSError):  # it has ended: the exit status says how
        channel.send(**message)
    return process


def import_path() -> list[str]:
    """Return where this process imports from, for one with another working directory."""
    return [os.path.abspath(entry) for entry in sys.path]


def _read_score() -> str:
    """Return how soon the kernel kills this process for lack of memory; Ray wants its workers killed first."""
    with suppress(OSError):
        return _SCORE.read_text().strip()
    return ""


def write_score(score: str) -> None:
    """Take over a score that `_read_score` returned. A fork has that of the driver."""
    with suppress(OSError):
        _SCORE.write_text(score)


def end_group(pid: int) -> None:
    """Kill a process that leads a group, or is about to, with the group."""
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def end_with(parent: int) -> None:
    """Let the kernel kill this process when the thread that started it ends; at once if the parent has ended."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1  # linux/prctl.h
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)


def name_process(name: str) -> None:
    """Give this process a name of at most 15 characters, which top and ps show."""
    if sys.platform == "linux":
        pr_set_name = 15  # linux/prctl.h
        ctypes.CDLL(None).prctl(pr_set_name, name.encode(), 0, 0, 0)
