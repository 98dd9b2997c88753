"""Locks between processes: files in folders, by flock(2). A lock ends with its process, however that ends.

filelock never removes a file or follows a link; without `fallback_to_soft`, no lock outlives its process.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

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
        parents: make its folder, see `files.whole`.

    Raises:
        InUse: another process still has it.
        OSError: the file cannot be made.
        UserError: its file system has no locks.
    """
    if parents:
        path.parent.mkdir(parents=True, exist_ok=True)
    path.parent.stat()  # filelock would make it
    lock = FileLock(path, timeout=limit_s, poll_interval=_LOOK_S, fallback_to_soft=False, on_acquired=_sign)
    try:
        lock.acquire()
    except Timeout:
        who = _read(path)
        raise InUse(f"{path} is locked by {who}; wait until that process ends, or end it.", who) from None
    except OSError as error:
        raise _without_locks(path, error) from error
    try:
        yield
    finally:
        lock.release()


def share_until_exit(path: Path) -> None:
    """Hold a shared lock of a file until this process ends: until then no other process holds it exclusively.

    filelock has no shared lock. Waits for an exclusive holder, without a limit. Raises as `exclusive`; the folder must
    exist.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)  # never closed
    try:
        fcntl.flock(handle, fcntl.LOCK_SH)
    except OSError as error:
        raise _without_locks(path, error) from error


def holder(path: Path) -> str:
    """Return the exclusive holder of a lock, as `exclusive` wrote it; "" without one, or if the file cannot be read."""
    with suppress(OSError), path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _read(path)
    return ""


@contextmanager
def locked(folder: Path, key: str, private: bool = False) -> Iterator[None]:
    """Reserve a folder for this process.

    Args:
        key: the key that sets the folder on the command line; a `resume` cannot use another folder.
        private: make a missing folder for this user only. An existing folder is changed only if it is empty: Hydra made
            it.

    Raises:
        InUse: another process works in it.
        UserError: it cannot be written, or its file system has no locks.
    """
    with ExitStack() as stack:
        try:
            if private:
                _make_private(folder)
            stack.enter_context(exclusive(folder / ".lock"))
        except InUse as error:
            instead = "" if key == "resume" else f", or use another folder: {key}=..."
            raise InUse(
                f"{key}={folder} is in use by another sweep or run ({error.holder}); wait until it ends{instead}",
                error.holder,
            ) from None
        except OSError as error:
            raise unwritable(key, folder, error) from error
        yield


def unwritable(key: str, folder: Path, error: OSError) -> UserError:
    """Return the message for a folder that cannot be made, or written. `key`: as for `locked`."""
    instead = "make it writable" if key == "resume" else f"set {key} to a writable folder"
    link = next((path for path in (folder, *folder.parents) if path.is_symlink() and not path.exists()), None)
    reason = error.strerror if link is None else f"{link} is a link to what does not exist"
    return UserError(f"{key}={folder} cannot be written ({reason}); free the disk, or {instead}.")


def _make_private(folder: Path) -> None:
    folder.mkdir(0o700, parents=True, exist_ok=True)
    if not any(folder.iterdir()):
        with suppress(PermissionError):  # another user owns it
            folder.chmod(0o700)


def _sign(handle: int) -> None:
    text = f"process {os.getpid()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}".encode()
    with suppress(OSError):  # a full disk: the lock holds all the same
        os.pwrite(handle, text, 0)
        os.truncate(handle, len(text))  # after the write: some disks wait when a file becomes empty


def _read(path: Path) -> str:
    return path.read_text(errors="replace")[:200].strip() or "an unknown process"


def _without_locks(path: Path, error: OSError) -> OSError | UserError:
    """Return the error of a file system without locks, or another one as it is."""
    if error.errno not in _NO_LOCKS:
        return error
    return UserError(
        f"{path.parent} is on a file system without locks ({error.strerror}), so two processes could write there "
        "at once; use another file system, or mount it with locks (Lustre: -o flock; NFS: with lockd)."
    )
