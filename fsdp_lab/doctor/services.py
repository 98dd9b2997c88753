"""Checks of the services that sweeps use: MLflow's store, and a Ray cluster if one is named."""

from __future__ import annotations

import os
import socket
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

from fsdp_lab.config.errors import UserError
from fsdp_lab.config.sweep import TrackingConfig
from fsdp_lab.doctor.finding import Finding
from fsdp_lab.redact import redact

_TIMEOUT_S = 2.0  # for a port, a lock or a check of a file
_PORTS = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}
_DEFAULT = f"tracking.uri={TrackingConfig.uri}"
_STORE = "MLflow store"


def check_store(uri: str) -> Finding:
    """Report whether the store exists and takes writes; for a server, whether it answers this user."""
    try:
        parts = urlsplit(uri)
        port = parts.port
    except ValueError:  # its words may hold a part of the password
        observation = f"{redact(uri)} is not an address"
        remedy = (
            "tracking.uri=<scheme>://<user>:<password>@<host>:<port>, with %2F for a / in the password, %40 for a @"
        )
        return Finding(_STORE, observation, remedy, fails=True)
    kind = parts.scheme.partition("+")[0]
    if kind in ("http", "https"):
        return _check_server(uri)
    if kind == "sqlite":
        return _check_sqlite(uri, Path(parts.path[1:]).absolute())
    if kind in _PORTS:
        return _check_port(
            _STORE, redact(uri), parts.hostname or "", port or _PORTS[kind], f"start it, or use {_DEFAULT}"
        )
    return Finding(_STORE, f"{redact(uri)} is not checked", "use a file, a server or a database" if not kind else "")


def _check_sqlite(uri: str, file: Path) -> Finding:
    if not os.path.exists(file):  # False also where a folder above it cannot be read
        folder = next(path for path in file.parents if os.path.exists(path))
        if not os.access(folder, os.W_OK):
            observation = f"{redact(uri)}: {folder} cannot be written"
            return Finding(_STORE, observation, "tracking.uri=sqlite:////<your folder>/mlflow.db", fails=True)
        return Finding(_STORE, f"{redact(uri)} does not exist yet; the first trial creates it")
    if unwritable := [path for path in (file, file.parent) if not os.access(path, os.W_OK)]:
        observation = f"{redact(uri)}: {unwritable[0]} cannot be written"
        return Finding(_STORE, observation, f"chmod u+w {unwritable[0]} as its owner, or use another file", fails=True)
    ends = time.monotonic() + _TIMEOUT_S
    try:
        with closing(sqlite3.connect(file, timeout=_TIMEOUT_S, isolation_level=None)) as database:
            database.execute("BEGIN IMMEDIATE")
            database.execute("ROLLBACK")
            runs = database.execute("SELECT count(*) FROM runs").fetchone()[0] if _is_made(database) else 0
            database.set_progress_handler(lambda: time.monotonic() > ends, 10_000)
            wrong = _damage(database)
    except sqlite3.Error as error:
        return Finding(_STORE, f"{redact(uri)}: {error}", _remedy(file, str(error)), fails=True)
    if wrong:
        return Finding(_STORE, f"{redact(uri)} is damaged: {wrong}", _remedy(file, "malformed"), fails=True)
    return Finding(_STORE, f"{redact(uri)} is writable and has {runs:,} runs")


def _is_made(database: sqlite3.Connection) -> bool:
    return database.execute("SELECT 1 FROM sqlite_master WHERE name = 'runs'").fetchone() is not None


def _damage(database: sqlite3.Connection) -> str:
    """Return the damage that SQLite finds within the time limit; "" for none."""
    try:
        answer = database.execute("PRAGMA quick_check(1)").fetchone()[0]
    except sqlite3.OperationalError as error:
        if "interrupted" in str(error):  # a large file: what was looked at is whole
            return ""
        raise
    return "" if answer == "ok" else answer.splitlines()[0]


def _remedy(file: Path, error: str) -> str:
    if "locked" in error:
        return f"end the program that holds {file} (fuser {file}), or use another file"
    return f"restore {file}, or move it away: the next trial creates a new one, and sweeps' folders keep their results"


def _check_server(uri: str) -> Finding:
    try:
        from fsdp_lab.tracking.store import open_store  # MLflow may be missing, as another finding says

        open_store(TrackingConfig(uri), to_write=False)
    except ImportError as error:
        return Finding(_STORE, f"{redact(uri)} is not asked: {error}", "install the libraries first")
    except UserError as error:
        observation, _, remedy = str(error).rstrip(".").rpartition("; ")
        return Finding(_STORE, observation, remedy, fails=True)
    return Finding(_STORE, f"{redact(uri)} answers")


def check_cluster(address: str) -> Finding:
    """Report whether the head node of a Ray cluster can be reached."""
    if address == "auto":
        return Finding("Ray cluster", "cluster.address=auto is resolved when a sweep starts")
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        observation = f"cluster.address={redact(address)} is not host:port"
        return Finding("Ray cluster", observation, "cluster.address=<head>:6379", fails=True)
    remedy = f"ray start --head --port={port} there, and open the port in the firewall"
    return _check_port("Ray cluster", redact(address), host, int(port), remedy)


def _check_port(subject: str, shown: str, host: str, port: int, remedy: str) -> Finding:
    try:
        socket.create_connection((host, port), _TIMEOUT_S).close()
    except OSError as error:
        return Finding(
            subject, f"{shown}: nothing answers at {host}:{port} ({error.strerror or error})", remedy, fails=True
        )
    return Finding(subject, f"{shown}: {host}:{port} answers")
