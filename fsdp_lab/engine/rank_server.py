"""A process on the driver's machine that has imported PyTorch, and forks the ranks of all trials.

The imports take a rank seconds of CPU time; a fork takes milliseconds. `serve` uses no thread, for the sake of forks. A
rank ends with the worker of Ray that asked for it, with this process, and with the driver.

Nothing that is imported here may ask CUDA for its devices: Ray sets a worker's `CUDA_VISIBLE_DEVICES` later.
"""

from __future__ import annotations

import importlib
import os
import select
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from fsdp_lab import quick_imports
from fsdp_lab.engine.rank_process import SERVER, Channel, end_group, end_with

# What every rank imports, whatever its trial.
MODULES = ("torchvision.models", "fsdp_lab.training", "fsdp_lab.engine.rank")
_REQUEST_S = 10.0  # for a request to arrive
_THREADS = "OMP_NUM_THREADS"  # libraries read it as they are imported
_server: list[subprocess.Popen[bytes]] = []


def start_server(folder: str, threads: int) -> None:
    """Start the process, whose address goes into the environment. Without it ranks start new Pythons.

    Args:
        folder: for its address; only this user can enter it.
        threads: of a rank, unless the user has set `OMP_NUM_THREADS`.
    """
    if not hasattr(os, "pidfd_open"):  # not Linux
        return
    address = str(Path(folder, "ranks"))
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(address)
        except OSError:  # the path is too long for a socket
            return
        listener.listen(socket.SOMAXCONN)
        _server[:] = [
            subprocess.Popen(
                [sys.executable, "-m", "fsdp_lab.engine.rank_server", str(listener.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=[listener.fileno()],
                start_new_session=True,  # Ctrl-C is the driver's
                env={_THREADS: str(threads), **os.environ},
            )
        ]
    os.environ[SERVER] = address


def stop_server() -> None:
    """End the process and its ranks. Does nothing if it was not started."""
    os.environ.pop(SERVER, None)
    while _server:
        server = _server.pop()
        if server.stdin is not None:
            server.stdin.close()
        server.wait()


class Server:
    """Forks ranks until the driver ends.

    Args:
        listener: for the requests of Ray's workers.
        driver: a file descriptor that closes with the driver.
    """

    def __init__(self, listener: socket.socket, driver: int) -> None:
        self._listener, self._driver = listener, driver
        self._poll = select.poll()
        self._poll.register(driver, select.POLLIN)
        self._poll.register(listener, select.POLLIN)
        self._ranks: dict[int, tuple[int, Channel]] = {}  # by a descriptor of the process: its number, and the channel
        self._workers: dict[int, int] = {}  # by the descriptor of a channel: the process

    def serve(self) -> None:
        """Fork a rank for each request, and report how it ended."""
        while True:
            descriptor, _ = self._poll.poll()[0]  # one at a time: what it closes may be another's number next
            if descriptor == self._driver:
                for pid, _ in self._ranks.values():
                    end_group(pid)
                return
            if descriptor == self._listener.fileno():
                self._accept()
            elif descriptor in self._ranks:
                self._reap(descriptor)
            else:  # Ray's worker is gone
                self._poll.unregister(descriptor)
                end_group(self._workers[descriptor])

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(_REQUEST_S)
        channel = Channel(connection)
        me = os.getpid()
        try:
            if (request := channel.receive()) is None:
                raise ConnectionError("the worker is gone")
            connection.settimeout(None)
            pid = os.fork()
        except OSError:  # the worker sees that the connection ends, and starts a new Python
            channel.close()
            return
        if pid == 0:
            self._become_rank(request, channel, me)
        descriptor = os.pidfd_open(pid)
        self._ranks[descriptor], self._workers[connection.fileno()] = (pid, channel), pid
        self._poll.register(descriptor, select.POLLIN)
        self._poll.register(connection, 0)  # of its end alone
        with suppress(OSError):
            channel.send(pid=pid)

    def _reap(self, descriptor: int) -> None:
        pid, channel = self._ranks.pop(descriptor)
        end_group(pid)  # what the rank has started
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with suppress(OSError):
            channel.send(exit=status)
        with suppress(KeyError):
            self._poll.unregister(channel.connection)
        self._poll.unregister(descriptor)
        os.close(descriptor)
        del self._workers[channel.connection.fileno()]
        channel.close()

    def _become_rank(self, request: Mapping[str, object], channel: Channel, server: int) -> NoReturn:
        """Train in this process, a fork, and end it."""
        from fsdp_lab.engine.rank import end_process, run_request

        os.setsid()
        end_with(server)
        self._listener.close()
        os.close(self._driver)
        os.open(os.devnull, os.O_RDONLY)  # the lowest free one: standard input
        for descriptor, (_, other) in self._ranks.items():
            os.close(descriptor)
            other.close()  # else a worker would not see that its rank has ended
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed()  # forks would all draw the same
        end_process(run_request(request, channel))


if __name__ == "__main__":
    quick_imports.begin()
    for module in MODULES:
        importlib.import_module(module)
    quick_imports.end()
    Server(socket.socket(fileno=int(sys.argv[1])), sys.stdin.fileno()).serve()
    os._exit(0)  # there is nothing to clean up, and libraries of PyTorch's print what they leak
