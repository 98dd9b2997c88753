"""A real MLflow store in a moment, and a real `mlflow server` for as long as a test needs it."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from tests import forked


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
def mlflow_server(
    folder: Path,
    *options: str,
    environment: Mapping[str, str] | None = None,
    store: str | None = None,
    host: str = "127.0.0.1",
    port: int | None = None,
    within: Sequence[str] = (),
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """`(address, process)` of a server; its process group is ended.

    Args:
        folder: gets its log.
        store: the address of its store; None: `mlflow.db` of the folder.
        within: what begins each command that is to reach it.
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
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, start_new_session=True, cwd=folder,
            env={**os.environ, **settings, **(environment or {})},
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 90
        while not (answers(port) if not within else _answers_within(within, host, port)):
            waiting = process.poll() is None and time.monotonic() < deadline
            assert waiting, (folder / "server.log").read_text()
            time.sleep(0.2)
        yield f"http://{host}:{port}", process
    finally:
        end(process)


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def _answers_within(within: Sequence[str], host: str, port: int) -> bool:
    ask = f"import urllib.request; urllib.request.urlopen('http://{host}:{port}/health', timeout=2).close()"
    return subprocess.run([*within, sys.executable, "-c", ask], capture_output=True, check=False).returncode == 0


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill the server with its workers: the group has the server's id."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=20)
