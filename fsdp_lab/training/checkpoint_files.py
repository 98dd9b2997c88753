"""A folder of checkpoints on the disk: which are whole, which is the newest, which may go.

`step_00000022/` holds DCP's files and `meta.json`, which names each file with its size. A checkpoint is whole when its
metadata can be read and its files have their sizes; bytes that changed in place are seen by DCP alone, when it reads.
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
    """What keeps a folder from being a whole checkpoint; None where nothing does.

    Raises:
        OSError: the disk does not say: it may be away, and a checkpoint on it whole.
    """
    try:
        meta = read_meta(checkpoint)
    except (FileNotFoundError, NotADirectoryError):
        return f"it has no {META}"
    except ValueError as error:
        return f"its {META} cannot be read ({error})"
    for name, size in meta.get("files", {}).items():  # earlier versions wrote no sizes
        try:
            found = (checkpoint / name).stat().st_size
        except FileNotFoundError as error:
            return f"its {name} cannot be read ({error.strerror})"
        if found != size:
            return f"its {name} has {found} bytes and was written with {size}"
    return None


def whole(folder: Path) -> bool:
    """Whether a folder is a finished checkpoint, undamaged as far as sizes tell."""
    return folder.name.startswith("step_") and damage(folder) is None


def all_whole(folder: Path) -> list[Path]:
    """The whole checkpoints in a folder, oldest first."""
    return [f for f in _all(folder) if whole(f)]


def latest(folder: Path) -> Path | None:
    """The newest whole checkpoint of a folder; the folder itself where it is one."""
    return find_latest(folder)[0]


def find_latest(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint of a folder (the folder itself where it is one), and what is wrong with each newer
    one, by its path."""
    damaged: list[str] = []
    itself = folder.name.startswith("step_") and (folder / META).exists()
    for checkpoint in [folder] if itself else reversed(_all(folder)):
        wrong = damage(checkpoint)
        if wrong is None:
            return checkpoint, damaged
        damaged.append(f"{checkpoint}: {wrong}")
    return None, damaged


def outdated(folder: Path, keep_last: int, keep_best: bool) -> list[Path]:
    """What is neither among the last `keep_last` whole ones nor the one with the least validation loss; damaged ones
    count only once a newer one is whole."""
    found = all_whole(folder)
    keep = set(found[-keep_last:])
    if keep_best and found:
        keep.add(best_of(found))
    return [f for f in _all(folder) if found and f not in keep and f.name <= found[-1].name]


def best_of(checkpoints: Sequence[Path]) -> Path:
    """Return the one with the least validation loss; of equals the first."""
    return min(checkpoints, key=lambda checkpoint: val_loss(read_meta(checkpoint)))


def begin(folder: Path, step: int) -> Path:
    """Make the folder of a checkpoint in the making, and remove what killed runs left of others."""
    for stale in folder.glob(".step_*"):
        shutil.rmtree(stale, ignore_errors=True)
    folder.mkdir(exist_ok=True)  # not its parents: where the trial's folder was removed, it has failed
    making = folder / f".step_{step:08d}.making"
    making.mkdir()
    return making


def publish(making: Path, target: Path, meta: dict[str, Any]) -> None:
    """Write the meta file and give a checkpoint its name, so that it is on the disk when this returns."""
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
    """Return what `publish` wrote.

    Raises:
        OSError: the file is not there, or cannot be read.
        ValueError: it is not JSON, or not ours.
    """
    return checked_meta((checkpoint / META).read_text(), "history")


def checked_meta(text: str | bytes, *keys: str) -> dict[str, Any]:
    """Return the metadata of a checkpoint with these keys.

    Raises:
        ValueError: as `read_meta`.
    """
    meta = json.loads(text)
    for key in keys:
        if not isinstance(meta, dict) or key not in meta:
            raise ValueError(f"it lacks `{key}`")
    return dict(meta)


def _all(folder: Path) -> list[Path]:
    """By name, which is by step."""
    return sorted(f for f in folder.glob("step_*") if f.is_dir()) if folder.is_dir() else []


def val_loss(meta: dict[str, Any]) -> float:
    """The one that a checkpoint was saved with."""
    history = meta["history"]
    return history[-1].get("val/loss", float("inf")) if history else float("inf")
