"""A Ray cluster that is not ours: `ray start` on this machine."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.processes import descendants
from tests.servers import free_port

_START_S = 60


@contextmanager
def process_tree(*command: str, env: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """A process that is ended with all its descendants, by their ids."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
    try:
        yield process
    finally:
        family = descendants(process.pid)
        process.terminate()
        _, alive = psutil.wait_procs(family, timeout=10)
        for child in alive:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        process.kill()
        process.communicate()


@contextmanager
def ray_head(env: Mapping[str, str] | None = None, gpus: int = 0) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`(address, process)` of a cluster with two cores on the loopback, and GPUs that are a number only."""
    port = free_port()
    ray = str(Path(sys.executable).with_name("ray"))
    command = [ray, "start", "--head", "--block", "--num-cpus=2", f"--num-gpus={gpus}", "--include-dashboard=false"]
    command += [f"--port={port}", "--node-ip-address=127.0.0.1", "--disable-usage-stats"]
    with process_tree(*command, env=env) as head:
        end = time.monotonic() + _START_S
        while time.monotonic() < end:
            assert head.poll() is None, head.communicate()[0]
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.2)
        yield f"127.0.0.1:{port}", head
