"""A process on the driver's machine that has imported PyTorch, and forks the ranks of all trials.

The imports take a rank seconds of CPU time; a fork takes milliseconds. `serve` uses no thread, for the sake of forks. A
rank ends with the worker of Ray that asked for it, with this process, and with the driver.

It also watches the host's memory, in place of Ray's monitor. That one knows the memory of Ray's own processes only, and
would kill one that holds little.

Nothing that is imported here may ask CUDA for its devices: Ray sets a worker's `CUDA_VISIBLE_DEVICES` later.
"""

from __future__ import annotations

import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import psutil

from fsdp_lab import quick_imports
from fsdp_lab.engine.rank_process import SERVER, Channel, end_group, end_with, import_path, write_score

# What every rank imports, whatever its trial.
MODULES = ("torchvision.models", "fsdp_lab.training", "fsdp_lab.engine.rank")
_REQUEST_S = 10.0  # for a request to arrive
_THREADS = "OMP_NUM_THREADS"  # libraries read it as they are imported
_MONITOR = "RAY_memory_monitor_refresh_ms"  # 0: Ray watches no memory
_THRESHOLD, _DEFAULT_THRESHOLD = "RAY_memory_usage_threshold", 0.95  # Ray's, of the memory in use
_LOOK_S = 0.25
_OFF = "0"
_server: list[subprocess.Popen[bytes]] = []


def start_server(folder: str, threads: int) -> None:
    """Start the process, whose address goes into the environment. Without it ranks start new Pythons.

    Args:
        folder: for its address; only this user can enter it.
        threads: of a rank, unless the user has set `OMP_NUM_THREADS`.
    """
    if _server or sys.platform != "linux":
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
                [sys.executable, "-P", "-m", "fsdp_lab.engine.rank_server", str(listener.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=[listener.fileno()],
                start_new_session=True,  # Ctrl-C is the driver's
                env={_THREADS: str(threads), **os.environ, "PYTHONPATH": os.pathsep.join(import_path())},
            )
        ]
    os.environ[SERVER] = address
    if _MONITOR not in os.environ:
        os.environ[_MONITOR] = _OFF


def stop_server() -> None:
    """End the process and its ranks. Does nothing if it was not started."""
    os.environ.pop(SERVER, None)
    if _server and os.environ.get(_MONITOR) == _OFF:
        del os.environ[_MONITOR]
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
        self._ended, self._wake = os.pipe()  # gets a byte when a rank ends
        for end in (self._ended, self._wake):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        self._poll = select.poll()
        for descriptor in (driver, self._ended, listener.fileno()):
            self._poll.register(descriptor, select.POLLIN)
        self._memory_limit, self._look_at = float(os.environ.get(_THRESHOLD, _DEFAULT_THRESHOLD)), 0.0
        self._too_large: set[int] = set()  # ranks that were killed for lack of memory
        self._ranks: dict[int, Channel] = {}  # by the process id of the rank
        self._workers: dict[int, int] = {}  # by the descriptor of a channel: the rank

    def serve(self) -> None:
        """Fork a rank for each request, and report how it ended."""
        while True:
            ready = self._poll.poll(1000 * _LOOK_S if self._ranks else None)
            self._watch_memory()
            if not ready:
                continue
            descriptor, _ = ready[0]  # one at a time: what it closes may be another's number next
            if descriptor == self._driver:
                for pid in self._ranks:
                    end_group(pid)
                return
            if descriptor == self._listener.fileno():
                self._accept()
            elif descriptor == self._ended:
                self._reap()
            else:  # Ray's worker is gone
                self._poll.unregister(descriptor)
                end_group(self._workers[descriptor])

    def _watch_memory(self) -> None:
        """Kill the largest rank if the host's memory is almost used up; the next one only when that has ended."""
        if not self._ranks or time.monotonic() < self._look_at or self._too_large & set(self._ranks):
            return
        self._look_at = time.monotonic() + _LOOK_S
        memory = psutil.virtual_memory()
        if memory.total - memory.available > self._memory_limit * memory.total:
            largest = max(self._ranks, key=_resident_pages)
            self._too_large.add(largest)
            end_group(largest)

    def _accept(self) -> None:
        channel = None
        me = os.getpid()
        try:
            connection, _ = self._listener.accept()
            connection.settimeout(_REQUEST_S)
            channel = Channel(connection)
            if (request := channel.receive()) is None:
                raise ConnectionError("the worker is gone")
            connection.settimeout(None)
            pid = os.fork()
        except (OSError, ValueError):  # the worker sees that the connection ends, and starts a new Python
            if channel is not None:
                channel.close()
            return
        if pid == 0:
            self._become_rank(request, channel, me)
        self._ranks[pid], self._workers[connection.fileno()] = channel, pid
        self._poll.register(connection, 0)  # of its end alone
        with suppress(OSError):
            channel.send(pid=pid)

    def _reap(self) -> None:
        """Report the ranks that have ended, and end what they have started."""
        with suppress(BlockingIOError):
            os.read(self._ended, 4096)
        with suppress(ChildProcessError):  # there is none
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                pid = ended.si_pid
                end_group(pid)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                channel = self._ranks.pop(pid, None)
                if channel is None:  # no rank
                    continue
                with suppress(OSError):
                    channel.send(exit=status, out_of_memory=pid in self._too_large)
                self._too_large.discard(pid)
                with suppress(KeyError):
                    self._poll.unregister(channel.connection)
                del self._workers[channel.connection.fileno()]
                channel.close()

    def _become_rank(self, request: Mapping[str, Any], channel: Channel, server: int) -> NoReturn:
        """Train in this process, a fork, and end it."""
        from fsdp_lab.engine.rank import end_process, run_request

        try:
            os.setsid()
            end_with(server)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._listener.close()
            for descriptor in (self._driver, self._ended, self._wake):
                os.close(descriptor)
            os.set_inheritable(os.open(os.devnull, os.O_RDONLY), True)  # the lowest free one: standard input
            for other in self._ranks.values():
                other.close()  # else a worker would not see that its rank has ended
            if channel.receive() is None:  # the worker has waited too long, and trains otherwise
                os._exit(0)
            write_score(request["oom_score_adj"])
            if (numpy := sys.modules.get("numpy")) is not None:
                numpy.random.seed()  # forks would all draw the same
            end_process(run_request(request, channel))
        except BaseException:  # noqa: BLE001 - this process is not to go on as the server
            traceback.print_exc()
        os._exit(1)


def _resident_pages(pid: int) -> int:
    """Return how much memory a process has; 0 if it has ended."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return 0


if __name__ == "__main__":
    quick_imports.begin()
    for module in MODULES:
        importlib.import_module(module)
    quick_imports.end()
    sys.stdout.flush()  # else each fork prints it
    Server(socket.socket(fileno=int(sys.argv[1])), sys.stdin.fileno()).serve()
    os._exit(0)  # there is nothing to clean up, and libraries of PyTorch's print what they leak
