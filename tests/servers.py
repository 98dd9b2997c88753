"""Real servers for as long as a test needs them: MLflow's and a node of Ray; and stores that MLflow has made."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import psutil

from tests import forked
from tests.processes import descendants

_START_S = 90


@cache
def _empty_store() -> Path:
    """Return the empty store of this test run, made by the first process that needs it."""
    from mlflow import MlflowClient

    store = forked.shared_folder() / "mlflow.db"
    with (forked.shared_folder() / "store.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not store.exists():
            new = store.with_name("new.db")
            MlflowClient(tracking_uri=f"sqlite:///{new}").search_experiments()
            new.rename(store)
    return store


def lay_store(folder: Path) -> None:
    """A copy of an empty store that MLflow made, where there is none: it takes seconds to make each. That one is made
    where there is none is in tests/tracking."""
    if not (folder / "mlflow.db").exists():
        shutil.copy(_empty_store(), folder / "mlflow.db")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def server(
    folder: Path,
    name: str,
    command: Sequence[str],
    is_ready: Callable[[str], bool],
    environment: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is ready, in a group of its own, which is ended.

    Args:
        folder: where it runs, and logs to `<name>.log`.
        is_ready: whether it is, by what its log has so far.
        environment: instead of this process's.
    """
    log = folder / f"{name}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, cwd=folder,
            env=environment,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + _START_S
        while not is_ready(log.read_text()):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill the server with its workers: the group has the server's id."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=20)


@contextmanager
def mlflow_server(
    folder: Path,
    *options: str,
    environment: Mapping[str, str] | None = None,
    store: str | None = None,
    host: str = "127.0.0.1",
    port: int | None = None,
    within: Sequence[str] = (),
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """`(address, process)` of a server.

    Args:
        store: the address of its store; None: `mlflow.db` of the folder.
        within: what begins its command.
    """
    if store is None:
        lay_store(folder)
    port = port or free_port()
    command = [
        *within, sys.executable, "-m", "mlflow", "server", "--host", host, "--port", str(port), "--workers", "1",
        "--backend-store-uri", store or f"sqlite:///{folder}/mlflow.db", *options,
    ]  # fmt: skip
    # Without the jobs it starts sooner; what it would tell its makers needs a network.
    settings = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    variables = {**os.environ, **settings, **(environment or {})}
    with server(folder, "server", command, lambda log: "Application startup complete" in log, variables) as process:
        yield f"http://{host}:{port}", process


@contextmanager
def ray_head(env: Mapping[str, str] | None = None, gpus: int = 0) -> Iterator[tuple[str, int]]:
    """`(address, process)` of a Ray with two cores on the loopback, and GPUs that are a number only."""
    address, folder = f"127.0.0.1:{free_port()}", Path(tempfile.mkdtemp(prefix="fsdp_lab_ray_"))
    command = [
        str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--num-cpus=2", f"--num-gpus={gpus}",
        "--include-dashboard=false", "--node-ip-address=127.0.0.1", f"--port={address.rpartition(':')[2]}",
        "--disable-usage-stats",
    ]  # fmt: skip
    with server(folder, "ray", command, lambda log: "Ray runtime started." in log, env) as head:
        yield address, head.pid
        family = descendants(head.pid)
        head.terminate()  # Ray ends its servers
        for left in psutil.wait_procs(family, timeout=10)[1]:
            left.kill()
    shutil.rmtree(folder)
