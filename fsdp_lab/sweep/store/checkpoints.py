"""Removing the checkpoints of a sweep that will not be resumed, on disk and in object storage."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

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
    for where in _places(folder):
        if is_address(str(where)):
            drop_stored_weights(Storage(str(where)))
        else:
            drop_weights(where)


def drop_weights(folder: Path) -> None:
    """Remove the checkpoints and the exported model of a trial.

    Raises:
        OSError: a file cannot be removed.
    """
    if (folder / "checkpoints").exists():
        shutil.rmtree(folder / "checkpoints")
    (folder / "model.pt").unlink(missing_ok=True)
    shutil.rmtree(folder / "model", ignore_errors=True)


def drop_stored_weights(storage: Storage) -> None:
    # the markers first: a kill leaves data that nothing names, and no checkpoint without its data
    names = sorted(name for name in storage.files() if name.partition("/")[0] in _WEIGHTS)
    storage.delete(sorted(names, key=lambda name: not name.endswith(".json")))


def _places(folder: Path) -> list[Any]:
    """Return the folders of a sweep's trials, and their addresses in object storage. Raises as `drop_checkpoints`."""
    addresses = [line["storage"] for line in lines_of(folder) if is_address(line.get("storage"))]
    folders = [
        (
            folder / line["folder"]
            if is_address(line.get("storage"))
            else Path(line.get("storage") or folder / line["folder"])
        ).resolve()
        for line in lines_of(folder)
    ]
    for where in (*folders, *addresses):
        if not is_storage_of(Path(where), folder):
            raise OSError(f"{folder}/trials.jsonl names {where}, which is not below the sweep's folder or its storage")
    return [*folders, *addresses]
