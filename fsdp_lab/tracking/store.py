"""Opening the store: fails within seconds, with a sentence, if it is missing or cannot be written."""

from __future__ import annotations

import errno
import logging
import os
import socket
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from fsdp_lab.config.errors import UserError
from fsdp_lab.config.sweep import TrackingConfig
from fsdp_lab.storage.locks import InUse, exclusive
from fsdp_lab.tracking.tags import NAME_LENGTH, SWEEP_TAG, how_to_read, one_line

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

_LOCAL = TrackingConfig().uri
_ARTIFACTS = "mlartifacts"  # the folder next to the database
_DATABASE_PORTS = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}
_PROBE_TIMEOUT_S = 8.0
# An expired token or a proxy takes a person to fix, so what is to be written waits.
_AWAY = (401, 403, 408, 429)
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)  # waiting changes none of these
_SQLITE_TIMEOUT_S = 10.0
_MOST_RUNS = 50_000  # that MLflow returns at once
_SCHEMA_LIMIT_S = 600.0  # for others to make the schema of a fresh store: some ten seconds each
# A server that stops answering costs (1 + retries) * timeout a write. MLflow's own defaults allow 16 minutes,
# and it would sleep for as long as a proxy's Retry-After header says.
_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "8",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    # Artifacts go through the server. MLflow would ask it for an address in its object storage, which drivers may not
    # reach: a small file took two minutes to fail.
    "MLFLOW_ENABLE_PROXY_MULTIPART_DOWNLOAD": "false",
    "MLFLOW_ENABLE_PROXY_MULTIPART_UPLOAD": "false",
}
# They log every migration, every retry, and each database error with its traceback; what matters of it
# becomes a TrackingError or goes to `on_problem`.
_NOISY_LOGGERS = ("alembic", "mlflow.store.db.utils", "urllib3.connectionpool")


class TrackingError(UserError):
    """The MLflow store cannot be used. The message names the key, its value, the problem and the remedy."""


def open_store(tracking: TrackingConfig, on_note: Callable[[str], None] | None = None) -> tuple[MlflowClient, str]:
    """Return a client of the store, and the id of the experiment.

    Args:
        on_note: called with what a user of the store should know; a missing schema and experiment are made. None: to
            read only, and the id may be "".

    Raises:
        TrackingError: the store is missing, cannot be written, or is of another version of MLflow.
    """
    length = len(tracking.experiment.strip())
    if not 0 < length <= NAME_LENGTH:
        raise TrackingError(f"tracking.experiment has {length} characters; give a name of 1 to {NAME_LENGTH}.")
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    check_home()
    with refusals(tracking):
        uri, artifacts = _check_uri(tracking.uri)
        # Two processes that make the schema of one fresh database break each other's migration.
        with _only_one(tracking.uri, artifacts):
            if on_note is not None and uri.startswith("sqlite"):
                check_sqlite(tracking.uri)
            from mlflow import MlflowClient

            for logger in _NOISY_LOGGERS:
                logging.getLogger(logger).setLevel(logging.CRITICAL)
            client = MlflowClient(tracking_uri=uri)
            if on_note is None:
                experiment = client.get_experiment_by_name(tracking.experiment)
                return client, str(experiment.experiment_id) if experiment else ""
            experiment_id = _ensure_experiment(client, tracking.experiment, artifacts)
            location = client.get_experiment(experiment_id).artifact_location
            check_place(tracking, location)
            if (folder := _local_folder(location)) is not None:
                _check_artifacts(tracking, folder)
                if not uri.startswith("sqlite") and folder != artifacts:
                    on_note(
                        f"tracking.experiment={tracking.experiment} of tracking.uri={tracking.uri} keeps its artifacts "
                        f"in {folder}: they are written to this machine's disk. Unless all who use the store share it, "
                        "serve it by mlflow server --artifacts-destination, and use another tracking.experiment"
                    )
            return client, experiment_id


@contextmanager
def refusals(tracking: TrackingConfig) -> Iterator[None]:
    """Translate errors of the store into TrackingErrors, with what MLflow or the library below it reports."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 (whatever MLflow, SQLAlchemy or a driver of theirs raises)
        remedy = "fix that" if tracking.uri == _LOCAL else f"fix that, or use tracking.uri={_LOCAL}"
        if tracking.uri.startswith("http"):
            access = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD if it requires them"
            remedy = f"start the server, {access}, or use tracking.uri={_LOCAL}"
        raise _error(tracking.uri, f"MLflow cannot use the store ({reason_of(error)})", remedy) from None


def _check_uri(uri: str) -> tuple[str, Path | None]:
    """Return the URI with an absolute path, and the folder of the artifacts; None if the server chooses it."""
    try:
        parts = urlsplit(uri)
        port = parts.port
    except ValueError:
        raise _error(uri, "its host or port cannot be read", "write a server as http://host:5000") from None
    kind = parts.scheme.partition("+")[0]
    if kind == "sqlite":
        path = sqlite_path(uri)
        path.parent.mkdir(parents=True, exist_ok=True)
        _, mark, query = uri.partition("?")
        return f"{uri.partition(':///')[0]}:///{path}{mark}{query}", path.parent / _ARTIFACTS
    if kind in _DATABASE_PORTS:
        if parts.hostname:  # MLflow would try ten times, for 100 s
            socket.create_connection((parts.hostname, port or _DATABASE_PORTS[kind]), _PROBE_TIMEOUT_S).close()
        return uri, sqlite_path(_LOCAL).parent / _ARTIFACTS
    return uri, None  # a server; or MLflow may know it by a plugin


def sqlite_path(uri: str) -> Path:
    """Return the absolute path of an sqlite store. It may have no character with another meaning in an address."""
    path, _, query = uri.partition(":///")[2].partition("?")
    if not path.strip("/") or ":memory:" in path:
        raise _error(uri, "the path of an sqlite file follows three slashes", f"use {_LOCAL}")
    absolute = Path(path).absolute()
    if any(sign in str(absolute) for sign in "?%") or "/" in query:
        reason = f"its path {absolute} has a % or ?, which an address gives another meaning"
        raise _error(uri, reason, "use a path without them")
    return absolute


def check_home() -> None:
    """Check that this user has a home folder, which MLflow asks for when it is imported.

    Raises:
        TrackingError: neither HOME nor the system names one.
    """
    try:
        Path.home()
    except RuntimeError:
        raise TrackingError(f"user {os.getuid()} has no home folder; set HOME to a folder of your own.") from None


def check_sqlite(uri: str) -> None:
    """Write to an sqlite store, and undo it: if that fails, MLflow would try for 100 s.

    Raises:
        TrackingError: it cannot be written, or another process holds it.
    """
    path = sqlite_path(uri)
    try:
        with closing(sqlite3.connect(path, timeout=_SQLITE_TIMEOUT_S, isolation_level=None)) as database:
            database.execute("BEGIN IMMEDIATE")
            database.execute("CREATE TABLE fsdp_lab_probe (x)")  # a read-only file allows what is above
            database.execute("ROLLBACK")
    except sqlite3.Error as error:
        remedy = "make it and its folder writable, end what holds it, or name another store"
        raise _error(uri, f"{path} cannot be written ({error})", remedy) from None


def _local_folder(location: str) -> Path | None:
    """Return the folder of artifacts that MLflow's client writes to itself; None for other places."""
    parts = urlsplit(location)
    return Path(unquote(parts.path)) if parts.scheme in ("", "file") else None


def _check_artifacts(tracking: TrackingConfig, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _error(
            tracking.uri,
            f"the artifacts of tracking.experiment={tracking.experiment} go to {folder}, which cannot be written "
            f"({error.strerror})",
            "make that folder writable, or use another tracking.experiment",
        ) from None


@contextmanager
def _only_one(uri: str, artifacts: Path | None) -> Iterator[None]:
    """Let one process of all users at a time open a store in a writable folder of this machine."""
    lock = artifacts.parent / ".mlflow.lock" if artifacts else None
    if lock is None or not os.access(lock if lock.exists() else lock.parent, os.W_OK):
        yield
        return
    try:
        with exclusive(lock, _SCHEMA_LIMIT_S):
            with suppress(PermissionError):  # another user has made it so
                lock.chmod(0o666)
            yield
    except InUse as error:
        raise _error(uri, f"another process is opening the store ({error.holder})", "wait until it ends") from None


def runs_url(tracking: TrackingConfig) -> str | None:
    """Return the address of an MLflow UI's runs, to which `/<id>` is added; None if no server is known.

    It holds no credentials.
    """
    parts = urlsplit(tracking.ui or tracking.uri)
    if parts.scheme not in ("http", "https"):
        return None
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/')}/#/runs"


def runs_of(client: MlflowClient, experiment_id: str, sweep_id: str) -> list[Run]:
    chosen = f"tags.`{SWEEP_TAG}` = '{sweep_id}'"
    return list(client.search_runs([experiment_id], chosen, max_results=_MOST_RUNS))


def _ensure_experiment(client: MlflowClient, name: str, artifacts: Path | None) -> str:
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        try:
            location = artifacts.as_uri() if artifacts else None
            # otherwise the UI guesses the kind, and asks
            tags = {"mlflow.note.content": how_to_read(), "mlflow.experimentKind": "custom_model_development"}
            return client.create_experiment(name, location, tags)
        except MlflowException:
            experiment = client.get_experiment_by_name(name)  # another sweep was quicker
            if experiment is None:
                raise
    if experiment.lifecycle_stage == "deleted":
        raise TrackingError(
            f"tracking.experiment={name} was deleted in MLflow; restore it with `mlflow experiments "
            f"restore --experiment-id {experiment.experiment_id}`, or give another tracking.experiment."
        )
    return str(experiment.experiment_id)


def check_place(tracking: TrackingConfig, location: str) -> None:
    """Check that the artifacts of an sqlite store are next to it: they do not move with it, as it has absolute paths.

    Args:
        location: of the artifacts, as the store has it.

    Raises:
        TrackingError: the store was moved or copied, and what is logged would go to the old place.
    """
    there = _local_folder(location)
    if there is None or not tracking.uri.startswith("sqlite") or _ARTIFACTS not in there.parts:
        return
    artifacts = sqlite_path(tracking.uri).parent / _ARTIFACTS
    there = Path(*there.parts[: there.parts.index(_ARTIFACTS) + 1])
    if there != artifacts and not (there.exists() and artifacts.exists() and there.samefile(artifacts)):
        raise TrackingError(
            f"tracking.experiment={tracking.experiment} keeps its artifacts in {there}, but its store is in "
            f"{artifacts.parent}: it was moved or copied. Move it back, link the old path to the new one, or use "
            "another tracking.experiment."
        )


def _error(uri: str, reason: str, remedy: str) -> TrackingError:
    return TrackingError(f"tracking.uri={uri}: {reason}; {remedy}.")


def reason_of(error: Exception) -> str:
    """Return an error in one line. In urllib3's chain of wrappers only the last one has information."""
    return one_line(str(error).rpartition("Caused by ")[2], 300) or type(error).__name__


def is_away(error: Exception) -> bool:
    """Return whether the store, or its disk or network, failed; otherwise it answered and refused this one request."""
    from mlflow.exceptions import MlflowException

    if isinstance(error, MlflowException):
        status = error.get_http_status_code()
        return status >= 500 or status in _AWAY or error.error_code == "ENDPOINT_NOT_FOUND"
    return isinstance(error, OSError) and error.errno not in _DENIED
