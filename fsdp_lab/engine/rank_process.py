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
from typing import Any

from fsdp_lab.hardware import RAYLET

SERVER = "FSDP_LAB_RANK_SERVER"  # the address of the process that forks ranks, in the environment of Ray's workers
_FORK_S = 60.0  # for the server to import PyTorch and fork


class RankFailed(RuntimeError):
    """A rank's process ended with an error, or was killed. What happened is in the trial's `failures/`, if known."""


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
    """

    def __init__(self, channel: Channel, python: subprocess.Popen[bytes] | None) -> None:
        self._channel, self._python, self._status = channel, python, -int(signal.SIGKILL)

    def epochs(self) -> Iterator[float]:
        """Yield each epoch that the rank reports; it waits until the next one is asked for."""
        while (message := self._channel.receive()) is not None:
            if "exit" in message:
                self._status = message["exit"]
            elif "epoch" in message:
                yield message["epoch"]
                with suppress(OSError):  # it was killed: the next message says so
                    self._channel.send(go=True)

    def wait(self) -> int:
        """Return the exit status of a process that reports no more; -n: signal n ended it."""
        return self._status if self._python is None else self._python.wait()

    def end(self) -> None:
        """Kill the process and what it has started, if they are still there."""
        if self._python is not None:
            end_group(self._python.pid)
            self._python.wait()
        self._channel.close()  # the server kills a fork whose worker is gone


@contextmanager
def rank_process(work: Mapping[str, Any], listener: int | None = None) -> Iterator[RankProcess]:
    """Start a rank's process, and end it when the block ends.

    Args:
        work: of the rank, see `rank.run_rank`.
        listener: a socket that the process inherits; None: none.
    """
    path = [os.path.abspath(entry) for entry in sys.path]  # the rank may have another working directory
    message = {"work": work, "path": path, "environment": {**os.environ, RAYLET: str(os.getppid())}}
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
        if channel.receive() is None:
            raise ConnectionError("it could not fork")
        connection.settimeout(None)
        return RankProcess(channel, None)
    except OSError as error:
        print(f"fsdp_lab: {address} forks no rank ({error}); the rank starts a new Python", file=sys.stderr)
        connection.close()
        return None


def _spawn(message: Mapping[str, Any], listener: int | None) -> RankProcess:
    """Start a new Python."""
    ours, theirs = socket.socketpair()
    inherited = [theirs.fileno(), *([] if listener is None else [listener])]
    python = subprocess.Popen(
        [sys.executable, "-m", "fsdp_lab.engine.rank", str(theirs.fileno()), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        pass_fds=inherited,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(message["path"])},
    )
    theirs.close()
    if listener is not None:
        os.close(listener)
    channel = Channel(ours)
    threading.Thread(target=_end_group_with, args=[python], daemon=True).start()
    with suppress(OSError):  # it has ended: the exit status says how
        channel.send(**message)
    return RankProcess(channel, python)


def _end_group_with(leader: subprocess.Popen[bytes]) -> None:
    """Kill what a rank has started, once it has ended: the channel closes when nobody has it."""
    leader.wait()
    end_group(leader.pid)


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


def name_process(rank: int) -> None:
    """Give this process the name `rank<r>`, which top and ps show."""
    if sys.platform == "linux":
        pr_set_name = 15  # linux/prctl.h
        ctypes.CDLL(None).prctl(pr_set_name, f"rank{rank}".encode(), 0, 0, 0)
