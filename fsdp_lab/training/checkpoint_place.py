"""Where checkpoints are: folders on a disk that all ranks see, or objects in storage.

| | on a disk | in object storage |
| --- | --- | --- |
| DCP's files | `.step_00000022.making/` | `step_00000022.<unique>/`, never written to again |
| it is a checkpoint | once that is renamed to `step_00000022/` | once `step_00000022.json`, which names those, is put |
| it is replaced | after it was renamed away | by the next `step_00000022.json` |
| it is removed | renamed, then deleted | `step_00000022.json` first, then what it named |

Either has metadata (`meta.json`; `step_00000022.json` itself) that names each file with its size. A checkpoint is whole
if its metadata can be read and its files have their sizes. Only DCP itself, while reading, notices bytes that changed
in place.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from fsdp_lab.config.address import is_address
from fsdp_lab.storage.files import sync
from fsdp_lab.storage.objects import Stamp, Storage, options
from fsdp_lab.training.model_state import CheckpointError

META = "meta.json"
# A checkpoint, and one in the making: its folder, or its address.
Where = Path | str


class Place(ABC):
    """The checkpoints of a trial. Only rank 0 reads and changes them; each rank makes its own writer and reader."""

    @abstractmethod
    def listed(self) -> Sequence[Where]:
        """Return the checkpoints as they are now, damaged ones too, oldest first."""

    @abstractmethod
    def meta(self, checkpoint: Where) -> dict[str, Any]:
        """Return the metadata of a checkpoint.

        Raises:
            OSError: it cannot be read.
            ValueError: it is not JSON, or not ours.
        """

    @abstractmethod
    def meta_file(self, checkpoint: Where) -> str:
        """Return the name of a checkpoint's metadata."""

    @abstractmethod
    def file_size(self, checkpoint: Where, meta: dict[str, Any], name: str) -> int | None:
        """Return the bytes of a file that the metadata names; None: it is missing."""

    @abstractmethod
    def has(self, checkpoint: Where) -> bool:
        """Return whether a checkpoint is one of these."""

    @abstractmethod
    def named(self, step: int) -> Where:
        """Return the name of the checkpoint of a step."""

    @abstractmethod
    def begin(self, step: int) -> Where:
        """Return a place to write a checkpoint to, and remove unfinished ones that a kill left."""

    @abstractmethod
    def size(self, making: Where) -> int:
        """Return the bytes of a finished save."""

    @abstractmethod
    def publish(self, making: Where, step: int, meta: dict[str, Any]) -> Where:
        """Make a finished save the checkpoint of a step, durably, and return it; it replaces an earlier one."""

    @abstractmethod
    def remove(self, checkpoints: Iterable[Where]) -> None:
        """Remove checkpoints; a kill in the middle leaves none that looks whole."""

    def damage(self, checkpoint: Where) -> str | None:
        """Return the reason why a checkpoint that `listed` returned is not whole; None for a whole one.

        Raises:
            OSError: the disk or the store does not answer; the checkpoint may be whole.
        """
        try:
            meta = self.meta(checkpoint)
        except (FileNotFoundError, NotADirectoryError):
            return f"it has no {self.meta_file(checkpoint)}"
        except ValueError as error:
            return f"its {self.meta_file(checkpoint)} cannot be read ({error})"
        for name, size in meta["files"].items():
            actual = self.file_size(checkpoint, meta, name)
            if actual is None:
                return f"its {name} is missing"
            if actual != size:
                return f"its {name} has {actual} bytes and was written with {size}"
        return None

    def whole(self) -> list[Where]:
        """Return the whole checkpoints, oldest first."""
        return [checkpoint for checkpoint in self.listed() if self.damage(checkpoint) is None]

    def find_latest(self) -> tuple[Where | None, list[str]]:
        """Return the newest whole checkpoint, or None, and `<checkpoint>: <damage>` of each newer one."""
        damaged: list[str] = []
        for checkpoint in reversed(self.listed()):
            wrong = self.damage(checkpoint)
            if wrong is None:
                return checkpoint, damaged
            damaged.append(f"{checkpoint}: {wrong}")
        return None, damaged

    def best(self) -> Where:
        """Return the whole checkpoint with the least validation loss; of equals the first.

        Raises:
            CheckpointError: there is none: they were removed or damaged meanwhile.
        """
        if not (whole := self.whole()):
            raise CheckpointError(
                f"checkpoint.export_best=true: of the trial's checkpoints, such as {self.named(0)}, none is whole; "
                "train again, and remove nothing there before the trial has ended."
            )
        return min(whole, key=self._val_loss)

    def _val_loss(self, checkpoint: Where) -> float:
        history = self.meta(checkpoint)["history"]
        return float(history[-1].get("val/loss", "inf")) if history else float("inf")

    def outdated(self, keep_last: int, keep_best: bool) -> list[Where]:
        """Return the checkpoints to remove: not among the last `keep_last` whole ones, nor, with `keep_best`, the best.

        A damaged one goes when a newer one is whole.
        """
        every = self.listed()
        whole = [checkpoint for checkpoint in every if self.damage(checkpoint) is None]
        if not whole:
            return []
        keep = {*whole[-keep_last:], *([min(whole, key=self._val_loss)] if keep_best else [])}
        return [each for each in every if each not in keep and str(each) <= str(whole[-1])]

    def prune(self, keep_last: int, keep_best: bool) -> None:
        self.remove(self.outdated(keep_last, keep_best))


def place_of(checkpoints: Where) -> Place:
    """Return the checkpoints in a folder or at an address; a checkpoint's own folder or address holds only that."""
    return InStorage(str(checkpoints)) if is_address(str(checkpoints)) else OnDisk(Path(checkpoints))


def step_of(checkpoint: Where) -> int:
    return int(str(checkpoint).rpartition("step_")[2])


def writer(making: Where, **settings: Any) -> StorageWriter:
    if isinstance(making, Path):
        return dcp.FileSystemWriter(making, **settings)
    # An object that was put is durable: without a file to sync, DCP would sync every disk of the machine.
    return dcp.FsspecWriter(making, sync_files=False, **settings, **options(making))


def reader(place: Place, checkpoint: Where) -> StorageReader:
    if isinstance(checkpoint, Path):
        return dcp.FileSystemReader(checkpoint)
    data = f"{checkpoint.rpartition('/')[0]}/{place.meta(checkpoint)['data']}"
    return dcp.FsspecReader(data, **options(data))


def _checked(text: str | bytes, *keys: str) -> dict[str, Any]:
    """Return the metadata of a checkpoint, which has `history`, `files` and these keys."""
    meta = json.loads(text)
    for key in ("history", "files", *keys):
        if not isinstance(meta, dict) or key not in meta:
            raise ValueError(f"it lacks `{key}`")
    if not isinstance(meta["files"], dict):
        raise ValueError("its `files` is no object")
    return dict(meta)


class OnDisk(Place):
    """A folder that all ranks see, or the one checkpoint whose folder it is. See `Place` for the methods."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def listed(self) -> list[Path]:
        if self.folder.name.startswith("step_") and (self.folder / META).exists():
            return [self.folder]
        return sorted(f for f in self.folder.glob("step_*") if f.is_dir()) if self.folder.is_dir() else []

    def meta(self, checkpoint: Where) -> dict[str, Any]:
        return _checked((Path(checkpoint) / META).read_text())

    def meta_file(self, checkpoint: Where) -> str:
        return META

    def file_size(self, checkpoint: Where, meta: dict[str, Any], name: str) -> int | None:
        with suppress(FileNotFoundError):
            return (Path(checkpoint) / name).stat().st_size
        return None

    def has(self, checkpoint: Where) -> bool:
        return isinstance(checkpoint, Path) and checkpoint.parent.absolute() == self.folder.absolute()

    def named(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}"

    def begin(self, step: int) -> Path:
        for stale in self.folder.glob(".step_*"):
            shutil.rmtree(stale, ignore_errors=True)
        self.folder.mkdir(exist_ok=True)  # not its parents: where the trial's folder was removed, it has failed
        making = self.folder / f".step_{step:08d}.making"
        making.mkdir()
        return making

    def size(self, making: Where) -> int:
        return sum(_sizes(Path(making)).values())

    def publish(self, making: Where, step: int, meta: dict[str, Any]) -> Path:
        """Write the metadata and rename the save, durably: it is on the disk when this returns."""
        making, target = Path(making), self.named(step)
        files = _sizes(making)
        with (making / META).open("w") as out:
            json.dump({**meta, "files": files}, out, indent=1)
            out.flush()
            os.fsync(out.fileno())
        sync(making)  # the names: DCP has synced the content of its files
        if target.exists():
            self.remove([target])
        making.rename(target)
        sync(target.parent)
        return target

    def remove(self, checkpoints: Iterable[Where]) -> None:
        for checkpoint in map(Path, checkpoints):
            trash = checkpoint.with_name(f".{checkpoint.name}.trash")
            checkpoint.rename(trash)
            shutil.rmtree(trash, ignore_errors=True)


def _sizes(folder: Path) -> dict[str, int]:
    return {str(f.relative_to(folder)): f.stat().st_size for f in sorted(folder.rglob("*")) if f.is_file()}


class InStorage(Place):
    """Objects below an address, or the one checkpoint whose address it is. See `Place` for the methods."""

    def __init__(self, address: str) -> None:
        above, _, name = address.rpartition("/")
        self._only = name if name.startswith("step_") else None
        self.address = above if self._only else address
        self._storage = Storage(self.address)
        self._there: dict[str, Stamp] = {}  # as last listed: for what follows `listed`
        self._known: dict[tuple[str, Stamp], dict[str, Any]] = {}  # each version of a file is read once

    def listed(self) -> list[str]:
        """List the storage once: what follows looks at the same list."""
        self._there = self._storage.files()
        return self._listed()

    def _listed(self) -> list[str]:
        names = sorted(name.removesuffix(".json") for name in self._there if name.endswith(".json") and "/" not in name)
        return [f"{self.address}/{name}" for name in names if name.startswith("step_") and self._only in (None, name)]

    def meta(self, checkpoint: Where) -> dict[str, Any]:
        """Return what `publish` put, and read each listed version once."""
        name = self.meta_file(checkpoint)
        stamp = self._there.get(name)
        if stamp is None:
            return _checked(self._storage.read(name), "data")
        if (name, stamp) not in self._known:
            self._known[name, stamp] = _checked(self._storage.read(name), "data")
        return self._known[name, stamp]

    def meta_file(self, checkpoint: Where) -> str:
        return f"{str(checkpoint).rpartition('/')[2]}.json"

    def file_size(self, checkpoint: Where, meta: dict[str, Any], name: str) -> int | None:
        size, _ = self._there.get(f"{meta['data']}/{name}", (None, ""))
        return size

    def has(self, checkpoint: Where) -> bool:
        return str(checkpoint).rpartition("/")[0] == self.address

    def named(self, step: int) -> str:
        return f"{self.address}/step_{step:08d}"

    def begin(self, step: int) -> str:
        """Return a unique address to write to: an object is never overwritten."""
        return f"{self.named(step)}.{uuid.uuid4().hex[:12]}"

    def size(self, making: Where) -> int:
        return sum(self._sizes(str(making).rpartition("/")[2]).values())

    def publish(self, making: Where, step: int, meta: dict[str, Any]) -> str:
        """Put the metadata, which names the objects of the save, and delete those of an earlier save of the step."""
        data, checkpoint = str(making).rpartition("/")[2], self.named(step)
        self._there = {}  # it is out of date now
        before: set[str] = set()
        with suppress(FileNotFoundError, ValueError):  # an attempt before may have saved this step, too
            before = {self.meta(checkpoint)["data"]}
        content = {**meta, "data": data, "files": self._sizes(data)}
        self._storage.write(self.meta_file(checkpoint), json.dumps(content, indent=1).encode())
        self._delete_data(before)
        return checkpoint

    def remove(self, checkpoints: Iterable[Where]) -> None:
        """Remove the metadata alone: `prune` removes objects that no checkpoint names."""
        self._storage.delete(map(self.meta_file, checkpoints))

    def prune(self, keep_last: int, keep_best: bool) -> None:
        """Remove what is outdated, and objects of interrupted saves, which no checkpoint names."""
        outdated = self.outdated(keep_last, keep_best)
        self.remove(outdated)
        whole = [each for each in self._listed() if each not in outdated and self.damage(each) is None]
        named = {self.meta(checkpoint)["data"] for checkpoint in whole}
        newest = max((str(checkpoint).rpartition("/")[2] for checkpoint in whole), default="")
        data = {name.partition("/")[0] for name in self._there if "/" in name}
        self._delete_data(each for each in data - named if each < newest)

    def _delete_data(self, data: Iterable[str]) -> None:
        for each in data:
            self._storage.delete(f"{each}/{name}" for name in self._sizes(each))

    def _sizes(self, data: str) -> dict[str, int]:
        return {name.removeprefix(f"{data}/"): stamp[0] for name, stamp in self._storage.files(data).items()}
