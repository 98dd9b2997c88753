"""What is kept of the first measurement of a trial whose timing is excluded, when it is measured again."""

from __future__ import annotations

from pathlib import Path

from fsdp_lab.config import UserError
from fsdp_lab.record.trial_folder import TRIAL_FILES
from fsdp_lab.storage import Storage, StorageAway
from fsdp_lab.sweep.store.checkpoints import drop_stored_weights, drop_weights


def set_aside(folder: Path, address: str | None) -> None:
    """Let a trial start over: move its record to `excluded.<n>/`, and remove its checkpoints and its model.

    Object storage comes first: a kill in between leaves a trial that has its result, and is set aside again.

    Args:
        folder: the trial's.
        address: the trial's in object storage; None: it has none.

    Raises:
        UserError: the store refuses, or does not answer.
    """
    numbers = [int(n) for path in folder.glob("excluded.*") if (n := path.suffix[1:]).isdecimal()]
    kept = folder / f"excluded.{1 + max(numbers, default=0)}"
    found = [path for kind in reversed(TRIAL_FILES) if kind.of_attempt for path in kind.find(folder)]
    # A trial that has an outcome and lacks epochs starts over; one that has epochs and no outcome would publish them.
    record = sorted(found, key=lambda path: path.name != "metrics.jsonl")
    kept.mkdir()  # before anything goes: the disk may be full
    if address is not None:
        try:
            _set_aside_in_storage(Storage(address), folder, kept.name, record)
        except (StorageAway, UserError) as error:
            kept.rmdir()
            if isinstance(error, UserError):
                raise
            raise UserError(f"cluster.storage_path={error}; resume the sweep when it answers.") from error
    drop_weights(folder)  # a trial that finds a checkpoint resumes from it
    for path in record:
        path.rename(kept / path.name)


def _set_aside_in_storage(storage: Storage, folder: Path, kept: str, record: list[Path]) -> None:
    files = [file for path in record for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    names = [str(file.relative_to(folder)) for file in files if file.is_file()]
    for name in names:
        storage.put(folder / name, f"{kept}/{name}")
    drop_stored_weights(storage)
    storage.delete(names)
