"""A trial's files in object storage, for workers without a common disk: ranks put them, the trial's process gets them.

A rank writes into a scratch folder on its node, as it would into the trial's. Each file is a whole object, put again
when it changes, so a reader sees the last version. Files that a reader must not miss are put before it is woken.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from fsdp_lab.locks import InUse, exclusive, share_until_exit
from fsdp_lab.storage import Stamp, Storage, StorageAway, StorageRefused

# What ranks write, see `trial_files.py`. In this order: metrics say that there are facts.
_OF_RANKS = (
    "facts.json",
    "failures/*",
    "logs/*",
    "memory_*_rank*",
    "model/*",
    "model.pt",
    "metrics.jsonl",
    "progress.json",
)
_OF_AN_ATTEMPT = ("facts.json", "failures/*", "progress.json")  # those of an attempt before say nothing of this one
_LOOK_S = 2.0
_LOG_S = 10.0  # between two puts of a log that grows
_PATIENCE_S = 300.0  # for a store that is away at the end of a trial
_SCRATCH = "fsdp_lab_scratch_"
_BEGINNING_S = 60.0  # in which a folder may not be locked yet


class Sender:
    """Puts the files in a rank's scratch folder: changed ones every two seconds, and all of them on `send`."""

    def __init__(self, storage: Storage, folder: Path) -> None:
        self._storage, self._folder = storage, folder
        self._sent: dict[str, tuple[int, int]] = {}
        self._log_at = 0.0
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="storage", daemon=True)

    def begin(self, rank: int) -> None:
        """Get the files that a rank appends to, from an earlier attempt; then watch the folder.

        Raises:
            StorageRefused: see there.
            StorageAway: see there.
        """
        for name in (f"logs/rank{rank}.log", *(["metrics.jsonl"] if rank == 0 else [])):
            (self._folder / name).parent.mkdir(exist_ok=True)
            with suppress(FileNotFoundError):
                self._storage.get(name, self._folder / name)
        self._thread.start()

    def send(self) -> None:
        """Put every file that has changed, and return when all are stored. Raises as `begin`."""
        with self._lock:
            self._send(logs=True)

    def end(self) -> None:
        """Send for the last time."""
        self._ended.set()
        self.send()

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_S):
            with self._lock, suppress(OSError, StorageRefused):  # `send` tells who must know
                self._send(logs=time.monotonic() - self._log_at > _LOG_S)

    def _send(self, logs: bool) -> None:
        if logs:
            self._log_at = time.monotonic()
        for name in _of_ranks(self._names()):
            with suppress(FileNotFoundError):  # it was replaced just now
                status = (self._folder / name).stat()
                stamp = (status.st_mtime_ns, status.st_size)
                if self._sent.get(name) != stamp and (logs or not name.startswith("logs/")):
                    self._storage.put(self._folder / name, name)
                    self._sent[name] = stamp

    def _names(self) -> list[str]:
        files = (path for path in self._folder.rglob("*") if path.is_file())
        return [str(path.relative_to(self._folder)) for path in files]


class Receiver:
    """Gets the files of ranks into the trial's folder on the driver's node."""

    def __init__(self, storage: Storage, folder: Path) -> None:
        self._storage, self._folder = storage, folder
        self._known: dict[str, Stamp] = {}
        self._lock, self._ended = threading.Lock(), threading.Event()

    def __getstate__(self) -> dict[str, Any]:
        """Return nothing: Ray sends the callbacks of its controller to the workers, which do not call them."""
        return {}

    def begin(self) -> None:
        """Get the files of earlier attempts, except those about their processes.

        Raises as `Sender.begin`.
        """
        stamps = self._storage.files()
        self._known = {name: stamps[name] for name in stamps if any(fnmatch(name, each) for each in _OF_AN_ATTEMPT)}
        self.receive()

    def receive(self) -> None:
        """Get every file that has changed. Raises as `Sender.begin`."""
        with self._lock:
            stamps = self._storage.files()
            for name in _of_ranks(list(stamps)):
                if self._known.get(name) != stamps[name]:
                    path = self._folder / name
                    if path.parent != self._folder:  # the trial's own may have been removed
                        path.parent.mkdir(exist_ok=True)
                    with suppress(FileNotFoundError):
                        self._storage.get(name, path)
                        self._known[name] = stamps[name]

    def receive_all(self) -> None:
        """Receive every file, waiting for a store that is away."""
        until = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return self.receive()
            except StorageAway:
                if time.monotonic() > until:
                    raise
                time.sleep(_LOOK_S)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Receive every two seconds."""
        thread = threading.Thread(target=self._watch, name="storage", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_S):
            with suppress(Exception):  # the trial's end tells of what stays wrong
                self.receive()


def _of_ranks(names: list[str]) -> list[str]:
    """Return the files that ranks write, in the order in which they must arrive."""
    parts = [name for name in names if not any(part.startswith(".") for part in name.split("/"))]
    order = {name: next((n for n, each in enumerate(_OF_RANKS) if fnmatch(name, each)), None) for name in parts}
    return sorted((name for name in parts if order[name] is not None), key=lambda name: (order[name], name))


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield a folder on this node's disk for this process alone. Folders of killed processes are removed."""
    for stale in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*"):
        with suppress(OSError, InUse):
            status = stale.stat()
            if status.st_uid == os.geteuid() and time.time() - status.st_mtime > _BEGINNING_S:
                with exclusive(stale / ".alive"):
                    shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_SCRATCH, ignore_cleanup_errors=True) as made:
        share_until_exit(Path(made, ".alive"))
        yield Path(made)
