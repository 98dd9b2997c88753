"""The temporary folder of a Ray that was started here: it is removed with its driver, however that ends."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from fsdp_lab.config.errors import UserError
from fsdp_lab.locks import exclusive, share_until_exit

_MARKER = ".fsdp_lab.lock"  # locked while the driver lives


def claim_session(folder: Path) -> None:
    """Mark a folder as this driver's, and remove those of killed drivers beside it.

    Folders that cannot be marked or removed stay.
    """
    with suppress(OSError, UserError):
        making = folder / f"{_MARKER}.making"  # a marker is never there without its lock
        share_until_exit(making)
        making.rename(folder / _MARKER)
    for marker in folder.parent.glob(f"session_*/{_MARKER}"):
        with suppress(OSError, UserError):  # its driver lives; or the file system has no locks
            if _is_own(marker) and _is_own(marker.parent):
                with exclusive(marker):
                    shutil.rmtree(marker.parent, ignore_errors=True)


def keep_session(folder: Path) -> None:
    """Keep later starts from removing a folder: its logs may contain the reason why a server ended."""
    with suppress(OSError):
        (folder / _MARKER).unlink(missing_ok=True)


def _is_own(path: Path) -> bool:
    """Whether it is this user's, and no link: everybody may write into the folder for temporary files."""
    return not path.is_symlink() and path.stat().st_uid == os.getuid()
