"""A real PostgreSQL server on the loopback, with a password, in a folder of its own."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_START_S = 60


def why_not() -> str:
    """Why there can be no server here; "" where there can."""
    if _program("initdb") is None or _program("postgres") is None:
        return "PostgreSQL needs initdb and postgres: as root, make .venv/.cluster installs postgresql"
    return "" if os.geteuid() != 0 or _servant() else "PostgreSQL does not run as root, and there is no other user"


def _program(name: str) -> str | None:
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
    user: dict[str, Any] = {"cwd": folder, "stdin": subprocess.DEVNULL}
    servant = _servant() if os.geteuid() == 0 else None
    as_servant: list[str] = []
    if servant:
        as_servant = ["setpriv", f"--reuid={servant.pw_uid}", f"--regid={servant.pw_gid}", "--clear-groups"]
    (folder / "password").write_text(password)
    if servant:
        for path in (folder, folder / "password"):
            os.chown(path, servant.pw_uid, servant.pw_gid)
    data = folder / "data"
    try:
        initdb = [str(_program("initdb")), "--pgdata", str(data), "--username=fsdp_lab", "--auth=scram-sha-256",
                  f"--pwfile={folder}/password", "--encoding=UTF8", "--locale=C", "--no-sync"]  # fmt: skip
        subprocess.run([*as_servant, *initdb], check=True, timeout=_START_S, capture_output=True, **user)
        serve = [str(_program("postgres")), "-D", str(data), "-p", str(port), "-c", "listen_addresses=127.0.0.1",
                 "-c", "unix_socket_directories=", "-c", "fsync=off"]  # fmt: skip
        with (folder / "log").open("wb") as log:
            server = subprocess.Popen([*within, *as_servant, *serve], stdout=log, stderr=log, **user)
        try:
            _wait(data / "postmaster.pid", server, folder / "log")
            yield f"postgresql+psycopg://fsdp_lab:{password}@127.0.0.1:{port}/postgres"
        finally:
            server.terminate()
            server.wait(timeout=20)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _wait(status: Path, server: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the server says in its file that it is ready; a network namespace keeps nobody from reading that."""
    deadline = time.monotonic() + _START_S
    while not (status.exists() and "ready" in status.read_text().split()):
        assert server.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
