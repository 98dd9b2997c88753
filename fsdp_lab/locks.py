"""Locks between processes: files in folders, by flock(2). A lock goes with its process, however that ends."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from fsdp_lab.config.errors import UserError

_LOOK_S = 0.1
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


class InUse(UserError):
    """Another process has the lock.

    Attributes:
        holder: which process, in words.
    """

    def __init__(self, message: str, holder: str = "") -> None:
        super().__init__(message)
        self.holder = holder


@contextmanager
def exclusive(path: Path, limit_s: float = 0.0, parents: bool = True) -> Iterator[None]:
    """Hold the lock of a file exclusively, and write the holder into it. The file is made.

    Args:
        path: of the file.
        limit_s: how long to wait for it.
        parents: make its folder, see `files.whole`.

    Raises:
        InUse: another process still has it.
        OSError: the file cannot be made.
        UserError: its file system has no locks.
    """
    if parents:
        path.parent.mkdir(parents=True, exist_ok=True)
    handle = _open(path)
    try:
        until = time.monotonic() + limit_s
        while not _take(handle, path, fcntl.LOCK_EX):
            if time.monotonic() > until:
                who = _read(handle)
                raise InUse(f"{path} is locked by {who}; wait until that process ends, or end it.", who)
            time.sleep(_LOOK_S)
        with suppress(OSError):  # a full disk: who it is would be told, the lock holds without
            os.truncate(handle, 0)
            os.pwrite(handle, f"process {os.getpid()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}".encode(), 0)
        yield
    finally:
        os.close(handle)


def share_until_exit(path: Path) -> None:
    """Hold the shared lock of a file until this process ends, so that no process can hold it exclusively.

    Waits for an exclusive holder, without a limit. Raises as `exclusive`; the folder must exist.
    """
    handle = _open(path)  # never closed
    while not _take(handle, path, fcntl.LOCK_SH):
        time.sleep(_LOOK_S)


def holder(path: Path) -> str:
    """Return the exclusive holder of a file's lock, as `exclusive` wrote it; "" without one."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return ""
    try:
        return "" if _take(handle, path, fcntl.LOCK_SH) else _read(handle)
    finally:
        os.close(handle)


@contextmanager
def locked(folder: Path, key: str, name: str = ".lock", private: bool = False) -> Iterator[None]:
    """Reserve a folder for this process.

    Args:
        folder: to reserve.
        key: the key that sets the folder on the command line; `resume` takes no other.
        name: of the file that is locked.
        private: make a missing folder for this user alone. An existing one is not changed, unless it is empty, because
            Hydra has made it.

    Raises:
        InUse: another process works in it.
        UserError: it cannot be written, or its file system has no locks.
    """
    with ExitStack() as stack:
        try:
            if private:
                _make_private(folder)
            stack.enter_context(exclusive(folder / name))
        except InUse as error:
            instead = "" if key == "resume" else f", or use another folder: {key}=..."
            raise InUse(
                f"{key}={folder} is in use by another sweep or run ({error.holder}); wait until it ends{instead}",
                error.holder,
            ) from None
        except OSError as error:
            instead = "make it writable" if key == "resume" else f"set {key} to a writable folder"
            raise UserError(
                f"{key}={folder} cannot be written ({error.strerror}); free the disk, or {instead}."
            ) from error
        yield


def _make_private(folder: Path) -> None:
    folder.mkdir(0o700, parents=True, exist_ok=True)
    if not any(folder.iterdir()):
        with suppress(PermissionError):  # it is somebody else's
            folder.chmod(0o700)


def _open(path: Path) -> int:
    # no link: who holds the lock is written into the file, and a link may point at any other
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)


def _take(handle: int, path: Path, kind: int) -> bool:
    """Take the lock, or return False where another process has it."""
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        raise UserError(
            f"{path.parent} is on a file system without locks ({error.strerror}), so two processes could write there "
            "at once; use another file system, or mount it with locks (Lustre: -o flock; NFS: with lockd)."
        ) from error
    return True


def _read(handle: int) -> str:
    return os.pread(handle, 200, 0).decode(errors="replace").strip() or "an unknown process"
