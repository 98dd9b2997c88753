"""A folder of checkpoints on a disk: which are complete, which is the newest, which can be removed.

`step_00000022/` holds DCP's files and `meta.json`, which names each file with its size. A checkpoint is whole if its
metadata can be read and its files have their sizes. Only DCP itself, while reading, notices bytes that changed in
place.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fsdp_lab.files import sync

META = "meta.json"


def damage(checkpoint: Path) -> str | None:
    """Return the reason why a folder is no whole checkpoint; None for a whole one.

    Raises:
        OSError: the disk does not answer; the checkpoint may be whole.
    """
    try:
        meta = read_meta(checkpoint)
    except (FileNotFoundError, NotADirectoryError):
        return f"it has no {META}"
    except ValueError as error:
        return f"its {META} cannot be read ({error})"
    if not isinstance(files := meta.get("files"), dict):
        return f"its {META} names no files"
    for name, size in files.items():
        try:
            actual = (checkpoint / name).stat().st_size
        except FileNotFoundError as error:
            return f"its {name} cannot be read ({error.strerror})"
        if actual != size:
            return f"its {name} has {actual} bytes and was written with {size}"
    return None


def whole(folder: Path) -> bool:
    """Return whether a folder is a finished checkpoint, undamaged as far as sizes show."""
    return folder.name.startswith("step_") and damage(folder) is None


def all_whole(folder: Path) -> list[Path]:
    """Return the whole checkpoints in a folder, oldest first."""
    return [f for f in _all(folder) if whole(f)]


def latest(folder: Path) -> Path | None:
    """Return the newest whole checkpoint of a folder, or the folder itself if it is one; None without any."""
    return find_latest(folder)[0]


def find_latest(folder: Path) -> tuple[Path | None, list[str]]:
    """Return the newest whole checkpoint of a folder, and the damage of each newer one.

    The folder itself may be a checkpoint. The checkpoint is None without a whole one; damage is `<path>: <reason>`.
    """
    damaged: list[str] = []
    itself = folder.name.startswith("step_") and (folder / META).exists()
    for checkpoint in [folder] if itself else reversed(_all(folder)):
        wrong = damage(checkpoint)
        if wrong is None:
            return checkpoint, damaged
        damaged.append(f"{checkpoint}: {wrong}")
    return None, damaged


def outdated(folder: Path, keep_last: int, keep_best: bool) -> list[Path]:
    """Return the checkpoints to remove: not among the last `keep_last` whole ones, and not the best.

    Damaged ones count only if a newer one is whole.

    Args:
        folder: of the checkpoints.
        keep_last: number of the newest whole ones that stay.
        keep_best: whether the one with the least validation loss stays.
    """
    whole = all_whole(folder)
    keep = set(whole[-keep_last:])
    if keep_best and whole:
        keep.add(best_of(whole))
    return [f for f in _all(folder) if whole and f not in keep and f.name <= whole[-1].name]


def best_of(checkpoints: Sequence[Path]) -> Path:
    """Return the checkpoint with the least validation loss; of equals the first."""
    return min(checkpoints, key=lambda checkpoint: val_loss(read_meta(checkpoint)))


def begin(folder: Path, step: int) -> Path:
    """Return a new folder to write a checkpoint to, and remove unfinished ones that killed runs left.

    Raises:
        FileNotFoundError: the trial's folder is gone.
    """
    for stale in folder.glob(".step_*"):
        shutil.rmtree(stale, ignore_errors=True)
    folder.mkdir(exist_ok=True)  # not its parents: where the trial's folder was removed, it has failed
    making = folder / f".step_{step:08d}.making"
    making.mkdir()
    return making


def publish(making: Path, target: Path, meta: dict[str, Any]) -> None:
    """Write the metadata and rename a finished save, durably: it is on the disk when this returns.

    Args:
        making: the folder that was written to.
        target: the checkpoint's name; an existing one is replaced.
        meta: without the files and their sizes, which are added.
    """
    files = {str(f.relative_to(making)): f.stat().st_size for f in sorted(making.rglob("*")) if f.is_file()}
    with (making / META).open("w") as out:
        json.dump({**meta, "files": files}, out, indent=1)
        out.flush()
        os.fsync(out.fileno())
    sync(making)  # the names: DCP has synced the content of its files
    if target.exists():
        discard([target])
    making.rename(target)
    sync(target.parent)


def discard(checkpoints: Iterable[Path]) -> None:
    """Remove checkpoints; a kill in the middle leaves none that looks whole."""
    for checkpoint in checkpoints:
        trash = checkpoint.with_name(f".{checkpoint.name}.trash")
        checkpoint.rename(trash)
        shutil.rmtree(trash, ignore_errors=True)


def read_meta(checkpoint: Path) -> dict[str, Any]:
    """Return the metadata that `publish` wrote.

    Raises:
        OSError: the file is missing, or cannot be read.
        ValueError: it is not JSON, or not ours.
    """
    return checked_meta((checkpoint / META).read_text(), "history")


def checked_meta(text: str | bytes, *keys: str) -> dict[str, Any]:
    """Return the metadata of a checkpoint, which has these keys.

    Args:
        text: JSON.
        *keys: the required ones.

    Raises:
        ValueError: the text is not JSON, or lacks a key.
    """
    meta = json.loads(text)
    for key in keys:
        if not isinstance(meta, dict) or key not in meta:
            raise ValueError(f"it lacks `{key}`")
    return dict(meta)


def _all(folder: Path) -> list[Path]:
    """Return the folders in the order of their names, which is the order of their steps."""
    return sorted(f for f in folder.glob("step_*") if f.is_dir()) if folder.is_dir() else []


def val_loss(meta: dict[str, Any]) -> float:
    """Return the validation loss with which a checkpoint was saved; infinite without one."""
    history = meta["history"]
    return history[-1].get("val/loss", float("inf")) if history else float("inf")
