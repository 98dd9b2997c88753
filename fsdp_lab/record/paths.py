"""Where the processes of a trial write."""

from __future__ import annotations

import os
import re
import uuid
from pathlib import Path

from fsdp_lab.config import UserError, is_address
from fsdp_lab.config.compose import Trial
from fsdp_lab.storage.files import write_text

_STORAGE = ".storage"


def storage(trial: Trial, sweep_folder: Path) -> Path:
    """Return the folder to which a trial's processes write, as the driver sees it.

    It is the trial's own, or the shared one of `cluster.storage_path`. With object storage it is the trial's own.

    Raises:
        UserError: the name of the sweep's folder there is lost.
    """
    above = trial.config.cluster.storage_path
    if above is None or is_address(above):
        return trial.folder.absolute()
    return Path(os.path.realpath(_below(above, trial, sweep_folder)))


def trial_address(trial: Trial, sweep_folder: Path) -> str | None:
    """Return the trial's address in object storage; None without one. Raises as `storage`."""
    above = trial.config.cluster.storage_path
    return _below(above, trial, sweep_folder) if above is not None and is_address(above) else None


def _below(above: str, trial: Trial, sweep_folder: Path) -> str:
    name, within = _storage_name(sweep_folder), os.path.relpath(trial.folder, sweep_folder)
    if name is None:
        raise UserError(
            f"{sweep_folder / _STORAGE} is damaged or missing; write into it the name of this sweep's folder below "
            f"cluster.storage_path={above} (trials.jsonl names the folders there), or start a new sweep."
        )
    return f"{above}/{name}" + ("" if within == "." else f"/{within}")  # "." for a trial alone


def name_storage(sweep_folder: Path, anew: bool = False) -> None:
    """Choose and record the name of the sweep's folder below `cluster.storage_path`.

    It is recorded in the sweep's own folder, so that a resume finds it from another node, and after the folder was
    moved.

    Args:
        sweep_folder: the sweep's own.
        anew: choose a new name even if one is recorded, because nothing is removed in object storage.
    """
    if anew or not (sweep_folder / _STORAGE).exists():
        own = uuid.uuid4().hex[:8]  # others may have a folder of that name
        sweep_folder.mkdir(parents=True, exist_ok=True)
        name = f"{'-'.join(sweep_folder.absolute().parts[-2:])}-{own}"
        write_text(sweep_folder / _STORAGE, name, durable=True)


def make_storage(trial: Trial, sweep_folder: Path) -> Path:
    """Return the folder of `storage`. If it does not exist, create it for this user only."""
    where = storage(trial, sweep_folder)
    top = where if trial.folder.absolute() == sweep_folder.absolute() else where.parent
    for folder in (top, where):  # `Path.mkdir` ignores the mode for parents
        folder.mkdir(0o700, parents=True, exist_ok=True)
    return where


def is_storage_of(where: Path, sweep_folder: Path) -> bool:
    """Return whether a trial's folder is below its sweep's folder, or below the sweep's folder on a shared disk."""
    if where.is_relative_to(sweep_folder.resolve()):
        return True
    return _storage_name(sweep_folder) in where.parts[1:]


def _storage_name(sweep_folder: Path) -> str | None:
    """Return the name that `name_storage` recorded; None if it is damaged or missing."""
    path = sweep_folder / _STORAGE
    name = path.read_text(errors="replace").strip() if path.exists() else ""
    return name if re.fullmatch(r"[^/]+-[0-9a-f]{8}", name) else None
