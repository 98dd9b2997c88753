"""The large files of ranks in object storage, for workers without a common disk: profiles, models and logs.

A rank writes into a scratch folder on its node instead of the trial's folder. It uploads its files at each epoch and at
its end. The trial's own process downloads them when the trial has ended; the driver downloads those of a stopped trial.
"""

from __future__ import annotations

import glob
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path

import psutil

from fsdp_lab.record.trial_files import TRIAL_FILES
from fsdp_lab.storage.objects import Storage, StorageAway, StorageRefused

_PATIENCE_S = 300.0  # to wait for an unreachable store at the end of a trial
_PAUSE_S = 2.0
_SCRATCH = f"fsdp_lab_{socket.gethostname()}_"  # containers may share the folder, but not process ids


def scratch_folder() -> Path:
    """Return a new temporary folder for this user only, and remove the folders of killed processes."""
    remove_left_scratch()
    return Path(tempfile.mkdtemp(prefix=f"{_SCRATCH}{os.getpid()}_"))


def remove_left_scratch() -> None:
    """Remove the scratch folders of processes of this machine that have ended."""
    for left in Path(tempfile.gettempdir()).glob(f"{glob.escape(_SCRATCH)}*"):
        process = left.name.removeprefix(_SCRATCH).partition("_")[0]
        if process.isdigit() and not psutil.pid_exists(int(process)):
            shutil.rmtree(left, ignore_errors=True)


class Uploads:
    """Puts a rank's files into the trial's storage."""

    def __init__(self, storage: Storage, folder: Path) -> None:
        self._storage, self._folder = storage, folder
        self._sent: dict[str, tuple[int, int]] = {}

    def send(self) -> None:
        """Put every file that has changed.

        Raises:
            StorageRefused: see there.
            StorageAway: see there.
        """
        for path in sorted(self._folder.rglob("*")):
            name = str(path.relative_to(self._folder))
            if path.is_file() and _is_of_ranks(name):
                status = path.stat()
                stamp = (status.st_mtime_ns, status.st_size)
                if self._sent.get(name) != stamp:
                    self._storage.put(path, name)
                    self._sent[name] = stamp


@contextmanager
def at_end(transfer: Callable[[], None]) -> Iterator[None]:
    """Send or get files when the block ends.

    An error of the block has priority over an error of the store. Does nothing if the process was asked to exit, which
    then does not wait for a store.
    """
    try:
        yield
    except Exception:
        with suppress(StorageRefused, StorageAway):
            transfer()
        raise
    transfer()


def receive(storage: Storage, folder: Path, patience_s: float = _PATIENCE_S) -> None:
    """Get the files of ranks into the trial's folder.

    Args:
        patience_s: how long to wait for an unreachable store.

    Raises:
        StorageRefused: see there.
        StorageAway: it does not answer for so long.
    """
    until = time.monotonic() + patience_s
    while True:
        try:
            for name in filter(_is_of_ranks, storage.files()):
                path = folder / name
                if path.parent != folder:  # the trial's folder may have been removed
                    path.parent.mkdir(exist_ok=True)
                storage.get(name, path)
            return
        except StorageAway:
            if time.monotonic() > until:
                raise
            time.sleep(_PAUSE_S)


def receive_now(address: str, folder: Path) -> None:
    """Get what the store at an address returns at once. The end of the trial or a resume gets the rest."""
    with suppress(StorageRefused, OSError):
        receive(Storage(address), folder, patience_s=0.0)


def _is_of_ranks(name: str) -> bool:
    hidden = any(part.startswith(".") for part in name.split("/"))
    return not hidden and any(fnmatch(name, kind.pattern) for kind in TRIAL_FILES if kind.of_ranks)
