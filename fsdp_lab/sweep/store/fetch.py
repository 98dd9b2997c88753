"""A sweep's folder from object storage: all that another machine's driver needs but the checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from fsdp_lab.config import UserError
from fsdp_lab.config.address import check_address
from fsdp_lab.locks import locked
from fsdp_lab.record.paths import copy_of, take_storage
from fsdp_lab.record.trial_folder import TRIAL_FILES
from fsdp_lab.storage import Storage, StorageAway

_COPIES = Path("outputs/from_storage")
_RECORD = "sweep.json"  # put last when a sweep starts: with it there is something to resume


def fetch_sweep(address: str, key: str) -> Path:
    """Copy a sweep from storage into a folder below `outputs/from_storage`, and return the folder.

    An existing copy is updated. A trial that ended in it while the store was away ends again from its last checkpoint.

    Args:
        address: of the sweep.
        key: the key of the address on the command line.

    Raises:
        UserError: there is no sweep, another process works in the copy, or the store refuses or does not answer.
    """
    address = address.rstrip("/")
    check_address(key, address)
    folder = (_COPIES / address.rpartition("/")[2]).absolute()
    try:
        storage = Storage(address)
        names = wanted(storage.files())
        if _RECORD not in names:
            raise UserError(
                f"{key}={address}: no sweep was started there (there is no {_RECORD}); give the address that the sweep "
                "printed at its start: cluster.storage_path and the sweep's name."
            )
        _COPIES.mkdir(parents=True, exist_ok=True)
        with locked(folder, key, private=True):
            if copy_of(folder) is not None:
                _remove_stale(folder, names)
            for name in names:
                (folder / name).parent.mkdir(0o700, parents=True, exist_ok=True)
                storage.get(name, folder / name)
                (folder / name).chmod(0o600)
            take_storage(folder, address)
    except StorageAway as error:
        raise UserError(f"{key}={error}; try again when it answers.") from error
    return folder


def _remove_stale(folder: Path, names: Iterable[str]) -> None:
    """Remove files of trials that storage no longer has: an old outcome would count, and be sent again."""
    there = set(names)
    for kind in (kind for kind in reversed(TRIAL_FILES) if kind.stored_by != "ranks"):
        for path in sorted(folder.rglob(kind.pattern)):
            if path.is_file() and str(path.relative_to(folder)) not in there:
                path.unlink()


def wanted(names: Iterable[str]) -> list[str]:
    """Return those of the objects that the copy gets, the record last. Nothing outside: a store takes any name."""
    ours = [name for name in names if _is_ours(PurePosixPath(name))]
    return sorted(ours, key=lambda name: (name == _RECORD, name))


def _is_ours(name: PurePosixPath) -> bool:
    hidden = [part for part in name.parts if part.startswith(".") and part != ".hydra"]
    return not (name.is_absolute() or hidden or "checkpoints" in name.parts)
