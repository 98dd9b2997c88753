"""Real servers for as long as a test needs them: MLflow's, S3 with faults in front of it, PostgreSQL, a node of Ray."""

from __future__ import annotations

import fcntl
import http.client
import math
import os
import pwd
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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
    is_ready: Callable[[], bool],
    environment: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is ready, in a group of its own, which is ended; its log is `<name>.log` in the folder.

    Args:
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
        while not is_ready():
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


def answers(url: str, within: Sequence[str] = (), method: str = "GET") -> bool:
    """Whether a server answers a request well.

    Args:
        within: what begins each command that is to reach it.
    """
    request = f"urllib.request.Request({url!r}, method={method!r})"
    ask = f"import urllib.request; urllib.request.urlopen({request}, timeout=5).close()"
    asked = subprocess.run([*within, sys.executable, "-S", "-c", ask], capture_output=True, timeout=30, check=False)
    return asked.returncode == 0


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
        folder: gets its log.
        store: the address of its store; None: `mlflow.db` of the folder.
        within: what begins each command that is to reach it.
    """
    if store is None:
        lay_store(folder)
    address = f"http://{host}:{port or free_port()}"
    command = [
        *within, sys.executable, "-m", "mlflow", "server", "--host", host, "--port", address.rpartition(":")[2],
        "--workers", "1", "--backend-store-uri", store or f"sqlite:///{folder}/mlflow.db", *options,
    ]  # fmt: skip
    # Without the jobs it starts sooner; what it would tell its makers needs a network.
    settings = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    variables = {**os.environ, **settings, **(environment or {})}
    with server(folder, "server", command, lambda: answers(f"{address}/health", within), variables) as process:
        yield address, process


@contextmanager
def ray_head(env: Mapping[str, str] | None = None, gpus: int = 0) -> Iterator[tuple[str, int]]:
    """`(address, process)` of a Ray with two cores on the loopback, and GPUs that are a number only."""
    port, folder = free_port(), Path(tempfile.mkdtemp(prefix="fsdp_lab_ray_"))
    ray = str(Path(sys.executable).with_name("ray"))
    command = [ray, "start", "--head", "--block", "--num-cpus=2", f"--num-gpus={gpus}", "--include-dashboard=false"]
    command += [f"--port={port}", "--node-ip-address=127.0.0.1", "--disable-usage-stats"]

    def listens() -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return True
        return False

    try:
        with server(folder, "ray", command, listens, env) as head:
            yield f"127.0.0.1:{port}", head.pid
            family = descendants(head.pid)
            head.terminate()  # Ray ends its servers
            for left in psutil.wait_procs(family, timeout=10)[1]:
                left.kill()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


KEY_ID, SECRET = "fsdplabtestkeyid", "fsdplab-test-secret-0f1e2d3c4b5a"
ALL_OF_THEM = math.inf
_ANSWER = '<?xml version="1.0"?><Error><Code>{code}</Code><Message>{message}</Message></Error>'


@contextmanager
def s3_server(
    folder: Path, port: int | None = None, host: str = "127.0.0.1", within: Sequence[str] = ()
) -> Iterator[int]:
    """The port of a server (moto's) with an empty bucket, `bucket`.

    Args:
        within: what begins each command that is to reach it.
    """
    port = port or free_port()
    command = [*within, sys.executable, "-m", "moto.server", "-H", host, "-p", str(port)]
    with server(folder, "s3", command, lambda: answers(f"http://{host}:{port}/bucket", within, "PUT")):
        yield port


def s3_settings(port: int, host: str = "127.0.0.1") -> dict[str, str]:
    """The environment of who uses it."""
    return {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": KEY_ID, "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
    }  # fmt: skip


class Faults:
    """What stands between a client and the server.

    Attributes:
        delay_s: every answer comes so much later.
        every: one in so many requests is answered 503; 0: none.
        cuts: so many connections more are cut without an answer; `ALL_OF_THEM`: the server is away.
        forbidden: requests that match this expression (`PUT /bucket/…`) are answered 403; "": none.
        requests: `(method, path)` of all that came.
    """

    def __init__(self, port: int) -> None:
        self.delay_s, self.every, self.cuts, self.forbidden = 0.0, 0, 0.0, ""
        self.requests: list[tuple[str, str]] = []
        self.behind = port

    def refusal(self, method: str, path: str) -> tuple[int, str] | None:
        """What a request gets instead of an answer."""
        if self.forbidden and re.search(self.forbidden, f"{method} {path}"):
            return 403, _ANSWER.format(code="AccessDenied", message="Access Denied")
        if self.every and len(self.requests) % self.every == 0:
            return 503, _ANSWER.format(code="ServiceUnavailable", message="Please try again")
        return None


@contextmanager
def faulty(port: int) -> Iterator[tuple[int, Faults]]:
    """`(port, faults)` of a proxy in front of a server, which passes everything on until told otherwise."""
    faults = Faults(port)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one(self) -> None:
            faults.requests.append((self.command, self.path))
            body = self._body()
            time.sleep(faults.delay_s)
            if faults.cuts > 0:
                faults.cuts -= 1
                self.close_connection = True
                return
            if refused := faults.refusal(self.command, self.path):
                self._answer(refused[0], [("Content-Type", "application/xml")], refused[1].encode())
                return
            behind = http.client.HTTPConnection("127.0.0.1", faults.behind, timeout=60)
            behind.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in ("content-length", "transfer-encoding", "connection", "expect"):
                    behind.putheader(name, value)
            behind.putheader("Content-Length", str(len(body)))
            behind.endheaders(body)
            answer = behind.getresponse()
            self._answer(answer.status, answer.getheaders(), answer.read())
            behind.close()

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_one

        def _body(self) -> bytes:
            if "chunked" not in self.headers.get("Transfer-Encoding", ""):
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            while self.rfile.readline().strip():  # trailers
                pass
            return b"".join(parts)

        def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
            with suppress(ConnectionError):
                self.send_response_only(status)
                length = {name.lower(): value for name, value in headers}.get("content-length", str(len(body)))
                for name, value in headers:
                    if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                        self.send_header(name, value)
                self.send_header("Content-Length", length if self.command == "HEAD" else str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_address[1], faults
    finally:
        server.shutdown()
        server.server_close()


def held_in(folder: Path, word: str) -> list[str]:
    """The files below a folder that have a word in them."""
    held = []
    for where, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                if word.encode() in Path(where, name).read_bytes():
                    held.append(str(Path(where, name)))
    return held


def why_no_postgres() -> str:
    """Why there can be no PostgreSQL here; "" where there can."""
    if _postgres_program("initdb") is None or _postgres_program("postgres") is None:
        return "PostgreSQL needs initdb and postgres: as root, make .venv/.cluster installs postgresql"
    return "" if os.geteuid() != 0 or _servant() else "PostgreSQL does not run as root, and there is no other user"


def _postgres_program(name: str) -> str | None:
    """Debian has them in a folder for each version, and not in the path."""
    result = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return str(result[-1]) if result else shutil.which(name)


def _servant() -> pwd.struct_passwd | None:
    """Whom the server runs as where this process is root, whom it refuses."""
    for name in ("postgres", "nobody"):
        with suppress(KeyError):
            return pwd.getpwnam(name)
    return None


@contextmanager
def postgres_server(port: int, within: Sequence[str] = ()) -> Iterator[str]:
    """The address of an empty database with its password, on the loopback.

    Args:
        within: what begins the server's command.
    """
    folder, password = Path(tempfile.mkdtemp(prefix="fsdp_lab_pg_")), secrets.token_hex(8)
    (folder / "password").write_text(password)
    as_servant: list[str] = []
    if os.geteuid() == 0 and (servant := _servant()):
        as_servant = ["setpriv", f"--reuid={servant.pw_uid}", f"--regid={servant.pw_gid}", "--clear-groups"]
        for path in (folder, folder / "password"):
            os.chown(path, servant.pw_uid, servant.pw_gid)
    status = folder / "data" / "postmaster.pid"  # a network namespace keeps nobody from reading that
    try:
        initdb = [str(_postgres_program("initdb")), "--pgdata", str(folder / "data"), "--username=fsdp_lab",
                  "--auth=scram-sha-256", f"--pwfile={folder}/password", "--encoding=UTF8", "--locale=C",
                  "--no-sync"]  # fmt: skip
        subprocess.run([*as_servant, *initdb], check=True, timeout=_START_S, capture_output=True, cwd=folder)
        serve = [str(_postgres_program("postgres")), "-D", str(folder / "data"), "-p", str(port), "-c",
                 "listen_addresses=127.0.0.1", "-c", "unix_socket_directories=", "-c", "fsync=off"]  # fmt: skip
        command = [*within, *as_servant, *serve]
        with server(folder, "postgres", command, lambda: status.exists() and "ready" in status.read_text()) as process:
            yield f"postgresql+psycopg://fsdp_lab:{password}@127.0.0.1:{port}/postgres"
            process.terminate()
            process.wait(timeout=20)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
