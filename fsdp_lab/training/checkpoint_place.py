"""Where checkpoints are: folders on a disk that all ranks see, or objects in storage.

| | on a disk | in object storage |
| --- | --- | --- |
| DCP's files | `.step_00000022.making/` | `step_00000022.<unique>/`, never written to again |
| it is a checkpoint | once that is renamed to `step_00000022/` | once `step_00000022.json`, which names those, is put |
| it is replaced | after it was renamed away | by the next `step_00000022.json` |
| it is removed | renamed, then deleted | `step_00000022.json` first, then what it named |

Either has metadata (`meta.json`; `step_00000022.json` itself) that names each file with its size.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from fsdp_lab.config.address import is_address
from fsdp_lab.storage import Stamp, Storage, options
from fsdp_lab.training import checkpoint_files as on_disk

# A checkpoint, and one in the making: its folder, or its address.
Where = Path | str


class Place(Protocol):
    """The checkpoints of a trial. Only rank 0 reads and changes them; each rank makes its own writer and reader."""

    def find_latest(self) -> tuple[Where | None, list[str]]:
        """Return the newest whole checkpoint, or None, and the damage of each newer one."""

    def has(self, checkpoint: Where) -> bool:
        """Return whether a checkpoint is one of these."""

    def meta(self, checkpoint: Where) -> dict[str, Any]:
        """Return the metadata of a checkpoint.

        Raises:
            OSError: it cannot be read.
            ValueError: it is not JSON, or not ours.
        """

    def best(self) -> Where:
        """Return the whole checkpoint with the least validation loss."""

    def named(self, step: int) -> Where:
        """Return the name of the checkpoint of a step."""

    def begin(self, step: int) -> Where:
        """Return a place to write a checkpoint to, and remove unfinished ones that a kill left."""

    def size(self, making: Where) -> int:
        """Return the bytes of a finished save."""

    def publish(self, making: Where, step: int, meta: dict[str, Any]) -> Where:
        """Make a finished save the checkpoint of a step, durably, and return it."""

    def prune(self, keep_last: int, keep_best: bool) -> None:
        """Remove checkpoints that are neither among the last `keep_last` nor, with `keep_best`, the best."""


def place_of(checkpoints: Where) -> Place:
    """Return the checkpoints in a folder or at an address; the address of one checkpoint holds only that."""
    return InStorage(str(checkpoints)) if is_address(str(checkpoints)) else OnDisk(Path(checkpoints))


def step_of(checkpoint: Where) -> int:
    """Return the optimizer step in a checkpoint's name."""
    return int(str(checkpoint).rpartition("step_")[2])


def writer(making: Where, **settings: Any) -> StorageWriter:
    """Return DCP's writer for a new checkpoint."""
    if isinstance(making, Path):
        return dcp.FileSystemWriter(making, **settings)
    # An object that was put is durable: without a file to sync, DCP would sync every disk of the machine.
    return dcp.FsspecWriter(making, sync_files=False, **settings, **options(making))


def reader(place: Place, checkpoint: Where) -> StorageReader:
    """Return DCP's reader for a checkpoint."""
    if isinstance(checkpoint, Path):
        return dcp.FileSystemReader(checkpoint)
    data = f"{checkpoint.rpartition('/')[0]}/{place.meta(checkpoint)['data']}"
    return dcp.FsspecReader(data, **options(data))


class OnDisk:
    """A folder that all ranks see. See `Place` for the methods."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_latest(self) -> tuple[Where | None, list[str]]:
        """See `checkpoint_files.find_latest`."""
        return on_disk.find_latest(self.folder)

    def has(self, checkpoint: Where) -> bool:
        """Return whether a checkpoint is directly in this folder."""
        return isinstance(checkpoint, Path) and checkpoint.parent.absolute() == self.folder.absolute()

    def meta(self, checkpoint: Where) -> dict[str, Any]:
        """See `checkpoint_files.read_meta`."""
        return on_disk.read_meta(Path(checkpoint))

    def best(self) -> Where:
        """See `checkpoint_files.best_of`."""
        return on_disk.best_of(on_disk.all_whole(self.folder))

    def named(self, step: int) -> Path:
        """Return the folder of the checkpoint of a step."""
        return self.folder / f"step_{step:08d}"

    def begin(self, step: int) -> Where:
        """See `checkpoint_files.begin`."""
        return on_disk.begin(self.folder, step)

    def size(self, making: Where) -> int:
        """Return the bytes of all files below a folder."""
        return sum(f.stat().st_size for f in Path(making).rglob("*") if f.is_file())

    def publish(self, making: Where, step: int, meta: dict[str, Any]) -> Where:
        """See `checkpoint_files.publish`."""
        target = self.named(step)
        on_disk.publish(Path(making), target, meta)
        return target

    def prune(self, keep_last: int, keep_best: bool) -> None:
        """See `checkpoint_files.outdated`."""
        on_disk.discard(on_disk.outdated(self.folder, keep_last, keep_best))


class InStorage:
    """Objects below an address, or the one checkpoint whose address it is. See `Place` for the methods."""

    def __init__(self, address: str) -> None:
        above, _, name = address.rpartition("/")
        self._only = f"{name}.json" if name.startswith("step_") else None
        self.address = above if self._only else address
        self._storage = Storage(self.address)
        self._known: dict[tuple[str, Stamp], dict[str, Any]] = {}

    def find_latest(self) -> tuple[Where | None, list[str]]:
        """Return the newest whole checkpoint, or None, and the damage of each newer one; lists the storage once."""
        damaged: list[str] = []
        there = self._storage.files()
        for marker in reversed(_markers(there)):
            if self._only in (None, marker):
                wrong = self._damage(marker, there)
                if wrong is None:
                    return self._named(marker), damaged
                damaged.append(f"{self._named(marker)}: {wrong}")
        return None, damaged

    def has(self, checkpoint: Where) -> bool:
        """Return whether a checkpoint is directly below this address."""
        return str(checkpoint).rpartition("/")[0] == self.address

    def meta(self, checkpoint: Where) -> dict[str, Any]:
        """Return the metadata of a checkpoint, without a cache."""
        return self._meta(f"{str(checkpoint).rpartition('/')[2]}.json")

    def best(self) -> Where:
        """Return the whole checkpoint with the least validation loss."""
        there = self._storage.files()
        whole = self._whole(there)
        losses = {marker: on_disk.val_loss(self._meta_at(marker, there[marker])) for marker in whole}
        return self._named(min(losses, key=lambda marker: losses[marker]))

    def named(self, step: int) -> str:
        """Return the address of the checkpoint of a step."""
        return f"{self.address}/step_{step:08d}"

    def begin(self, step: int) -> Where:
        """Return a unique address to write to: an object is never overwritten."""
        return f"{self.named(step)}.{uuid.uuid4().hex[:12]}"

    def size(self, making: Where) -> int:
        """Return the bytes of all objects below an address."""
        return sum(self._sizes(str(making).rpartition("/")[2]).values())

    def publish(self, making: Where, step: int, meta: dict[str, Any]) -> Where:
        """Put the metadata, which names the objects of the save, and delete those of an earlier save of the step."""
        data, marker = str(making).rpartition("/")[2], f"step_{step:08d}.json"
        before: set[str] = set()
        with suppress(FileNotFoundError, ValueError):  # an attempt before may have saved this step, too
            before = {self._meta(marker)["data"]}
        content = {**meta, "data": data, "files": self._sizes(data)}
        self._storage.write(marker, json.dumps(content, indent=1).encode())
        self._delete_data(before)
        return self.named(step)

    def prune(self, keep_last: int, keep_best: bool) -> None:
        """Remove outdated checkpoints, and objects of interrupted saves, which no checkpoint names."""
        there = self._storage.files()
        metas = {marker: self._meta_at(marker, there[marker]) for marker in self._whole(there)}
        keep = set(list(metas)[-keep_last:])
        if keep_best and metas:
            keep.add(min(metas, key=lambda marker: on_disk.val_loss(metas[marker])))
        newest = max(metas, default="")
        outdated = [marker for marker in _markers(there) if marker not in keep and marker <= newest]
        self._storage.delete(outdated)
        named = {metas[marker]["data"] for marker in keep}
        data = {name.partition("/")[0] for name in there if "/" in name}
        self._delete_data(each for each in data - named if each < newest.removesuffix(".json"))

    def _delete_data(self, data: Iterable[str]) -> None:
        for each in data:
            self._storage.delete(f"{each}/{name}" for name in self._sizes(each))

    def _whole(self, there: dict[str, Stamp]) -> list[str]:
        return [marker for marker in _markers(there) if self._damage(marker, there) is None]

    def _damage(self, marker: str, there: dict[str, Stamp]) -> str | None:
        """Return the reason why a checkpoint is not whole; None for a whole one."""
        try:
            meta = self._meta_at(marker, there[marker])
        except FileNotFoundError:
            return "it was removed while it was read"
        except ValueError as error:
            return f"its {marker} cannot be read ({error})"
        for name, size in meta["files"].items():
            stamp = there.get(f"{meta['data']}/{name}")
            if stamp is None:
                return f"its {meta['data']}/{name} is missing"
            if stamp[0] != size:
                return f"its {meta['data']}/{name} has {stamp[0]} bytes and was written with {size}"
        return None

    def _meta_at(self, marker: str, stamp: Stamp) -> dict[str, Any]:
        """Return the metadata of a checkpoint, reading each version once."""
        if (marker, stamp) not in self._known:
            self._known[marker, stamp] = self._meta(marker)
        return self._known[marker, stamp]

    def _meta(self, marker: str) -> dict[str, Any]:
        return on_disk.checked_meta(self._storage.read(marker), "history", "data", "files")

    def _sizes(self, data: str) -> dict[str, int]:
        return {name.removeprefix(f"{data}/"): stamp[0] for name, stamp in self._storage.files(data).items()}

    def _named(self, marker: str) -> str:
        return f"{self.address}/{marker.removesuffix('.json')}"


def _markers(there: dict[str, Stamp]) -> list[str]:
    """By name, which is by step."""
    return sorted(name for name in there if name.startswith("step_") and name.endswith(".json") and "/" not in name)
