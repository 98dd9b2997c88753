"""Removing the checkpoints of a sweep that will not be resumed, on disk and in object storage."""

from __future__ import annotations

import shutil
from pathlib import Path

from fsdp_lab.config import is_address
from fsdp_lab.record.paths import is_storage_of
from fsdp_lab.record.trials_jsonl import lines_of
from fsdp_lab.storage.objects import Storage

_WEIGHTS = ("checkpoints", "model.pt", "model")  # of a trial


def drop_checkpoints(folder: Path) -> None:
    """Remove the checkpoints and exported models of a sweep that will not be resumed; measurements stay.

    Reads only `trials.jsonl`: the configs may be of other code.

    Raises:
        OSError: a file cannot be removed, or does not belong to the sweep; then nothing of it is touched.
    """
    folders, addresses = [], []
    for line in lines_of(folder):
        if is_address(place := line.get("storage")):
            addresses.append(str(place))
            place = None
        folders.append(Path(place or folder / line["folder"]).resolve())
    for where in (*folders, *map(Path, addresses)):
        if not is_storage_of(where, folder):
            raise OSError(f"{folder}/trials.jsonl names {where}, which is not below the sweep's folder or its storage")
    for path in (where / name for where in folders for name in _WEIGHTS):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    for storage in map(Storage, addresses):
        # the markers first: a kill leaves data that nothing names, and no checkpoint without its data
        names = sorted(name for name in storage.files() if name.partition("/")[0] in _WEIGHTS)
        storage.delete(sorted(names, key=lambda name: not name.endswith(".json")))
