"""Where checkpoints are: files in a folder that all ranks see, or objects at an address, by the same rules.

DCP's files are below `step_00000022.<unique>/`, which is never written to again. They are a checkpoint once
`step_00000022.json` exists, which names them with their sizes. Replacing this file replaces the checkpoint; to remove a
checkpoint, this file is removed first. Only DCP itself, while it reads, notices bytes that changed in place.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from fsdp_lab.config.address import is_address
from fsdp_lab.storage.files import sync, whole
from fsdp_lab.storage.objects import Stamp, Storage, options
from fsdp_lab.training.model_state import CheckpointError

MARKER = "step_<number>.json"


@dataclass(frozen=True)
class Saved:
    """A checkpoint.

    Attributes:
        name: the folder or address of the checkpoints, and `step_<number>`.
        meta: its metadata; empty if they cannot be read.
        damage: why it is not whole; None: it is.
    """

    name: str
    meta: dict[str, Any]
    damage: str | None

    @property
    def step(self) -> int:
        return int(self.name.rpartition("step_")[2])

    @property
    def val_loss(self) -> float:
        history = self.meta["history"]
        return float(history[-1].get("val/loss", "inf")) if history else float("inf")

    def reader(self) -> StorageReader:
        data = f"{self.name.rpartition('/')[0]}/{self.meta['data']}"
        return dcp.FsspecReader(data, **options(data)) if is_address(data) else dcp.FileSystemReader(data)


def writer(making: str, **settings: Any) -> StorageWriter:
    if is_address(making):
        # An object that was put is durable: without a file to sync, DCP would sync every disk of the machine.
        return dcp.FsspecWriter(making, sync_files=False, **settings, **options(making))
    return dcp.FileSystemWriter(making, **settings)


class Place:
    """The checkpoints in a folder or at an address, or the one that a path names. Rank 0 reads and changes them."""

    def __init__(self, place: str) -> None:
        place = place.rstrip("/") if is_address(place) else str(Path(place).absolute())
        above, _, name = place.rpartition("/")
        self._only = name.partition(".")[0] if re.match(r"step_\d{8}(\.|$)", name) else ""
        self.root = above if self._only else place
        self._files = Storage(self.root) if is_address(self.root) else _Disk(Path(self.root))

    def saved(self) -> Iterator[Saved]:
        """Yield the checkpoints, damaged ones too, newest first."""
        there = self._files.files()
        for marker in sorted((name for name in there if name.endswith(".json")), reverse=True):
            if marker.startswith(self._only or "step_"):
                yield self._read(marker, there)

    def _read(self, marker: str, there: dict[str, Stamp]) -> Saved:
        name = f"{self.root}/{marker.removesuffix('.json')}"
        try:
            meta = _checked(self._files.read(marker))
        except (FileNotFoundError, ValueError) as error:
            return Saved(name, {}, f"its {marker} cannot be read ({error})")
        for file, size in meta["files"].items():
            actual, _ = there.get(f"{meta['data']}/{file}", (None, ""))
            if actual is None:
                return Saved(name, meta, f"its {file} is missing")
            if actual != size:
                return Saved(name, meta, f"its {file} has {actual} bytes and was written with {size}")
        return Saved(name, meta, None)

    def find_latest(self) -> tuple[Saved | None, list[str]]:
        """Return the newest whole checkpoint, or None, and `<checkpoint>: <damage>` of each newer one."""
        damaged: list[str] = []
        for checkpoint in self.saved():
            if checkpoint.damage is None:
                return checkpoint, damaged
            damaged.append(f"{checkpoint.name}: {checkpoint.damage}")
        return None, damaged

    def best(self) -> Saved:
        """Return the whole checkpoint with the least validation loss; in a tie the first.

        Raises:
            CheckpointError: there is none: they were removed or damaged meanwhile.
        """
        whole = [checkpoint for checkpoint in self.saved() if checkpoint.damage is None]
        if not whole:
            raise CheckpointError(
                f"checkpoint.export_best=true: of the trial's checkpoints, {self.root}/{MARKER}, none is whole; train "
                "again, and remove nothing there before the trial has ended."
            )
        return _best(whole)

    def begin(self, step: int) -> str:
        """Return a place to write a checkpoint to; on a disk, remove unfinished ones that a kill left."""
        if isinstance(self._files, _Disk):  # in storage, a rank of another attempt may still write
            self._files.clear()
            self._drop_data(self._unnamed())
        return f"{self.root}/step_{step:08d}.{uuid.uuid4().hex[:12]}"

    def size(self, making: str) -> int:
        """Return the bytes of a finished save."""
        return sum(self._sizes(making.rpartition("/")[2]).values())

    def publish(self, making: str, meta: dict[str, Any]) -> str:
        """Make a finished save a checkpoint, durably, and return its name; it replaces an earlier one of the step."""
        data = making.rpartition("/")[2]
        name = data.partition(".")[0]
        content = {**meta, "data": data, "files": self._sizes(data)}
        if isinstance(self._files, _Disk):
            sync(Path(making))  # only names: DCP has synced the content of its files
        self._files.write(f"{name}.json", json.dumps(content, indent=1).encode())
        self._drop_data(each for each in self._data() if each.startswith(f"{name}.") and each != data)
        return f"{self.root}/{name}"

    def room(self) -> str:
        """Return the free space of its disk, in words; "" for storage. PyTorch's error does not mention a full disk."""
        if not isinstance(self._files, _Disk):
            return ""
        return f"the disk of {self.root} has {shutil.disk_usage(self.root).free / 2**20:,.0f} MiB left"

    def discard(self, making: str) -> None:
        """Remove what a failed save has written to a disk."""
        with suppress(OSError):  # the error of the save is what counts
            if isinstance(self._files, _Disk):
                self._drop_data([making.rpartition("/")[2]])

    def prune(self, keep_last: int, keep_best: bool) -> None:
        """Keep the last `keep_last` whole checkpoints and, with `keep_best`, the best one.

        A damaged or interrupted one goes when a newer one is whole.
        """
        every = list(self.saved())
        whole = [checkpoint for checkpoint in every if checkpoint.damage is None]
        keep = [*whole[:keep_last], *([_best(whole)] if keep_best and whole else [])]
        newest = whole[0].name if whole else ""
        outdated = [each.name for each in every if each not in keep and each.name < newest]
        self._files.delete(f"{name.rpartition('/')[2]}.json" for name in outdated)
        self._drop_data(each for each in self._unnamed() if f"{self.root}/{each}" < newest)

    def _data(self) -> set[str]:
        return {data for name in self._files.files() if not (data := name.partition("/")[0]).endswith(".json")}

    def _unnamed(self) -> list[str]:
        """Return the names of data without a marker of their step."""
        there = self._files.files()
        return [each for each in self._data() if f"{each.partition('.')[0]}.json" not in there]

    def _drop_data(self, data: Iterable[str]) -> None:
        for each in data:
            self._files.delete([*self._files.files(each), each])

    def _sizes(self, data: str) -> dict[str, int]:
        return {name.removeprefix(f"{data}/"): size for name, (size, _) in self._files.files(data).items()}


def _best(whole: Sequence[Saved]) -> Saved:
    return min(reversed(whole), key=lambda checkpoint: checkpoint.val_loss)


def _checked(text: bytes) -> dict[str, Any]:
    """Return the metadata of a checkpoint, which has `history`, `files` and `data`."""
    meta = json.loads(text)
    for key in ("history", "files", "data"):
        if not isinstance(meta, dict) or key not in meta:
            raise ValueError(f"it lacks `{key}`")
    if not isinstance(meta["files"], dict):
        raise ValueError("its `files` is no object")
    return dict(meta)


class _Disk:
    """A folder by the methods of `Storage`: what was written is on the disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def clear(self) -> None:
        """Make the folder, and remove what was not renamed."""
        self._folder.mkdir(exist_ok=True)  # without parents: if the trial's folder was removed, the trial fails
        for stale in self._folder.glob(".step_*"):
            stale.unlink()

    def files(self, below: str = "") -> dict[str, Stamp]:
        """Return the files and folders of checkpoints, with their sizes."""
        found = {}
        with suppress(FileNotFoundError, NotADirectoryError):  # a trial that runs has replaced it since
            for file in os.scandir(self._folder / below):
                name = f"{below}/{file.name}" if below else file.name
                if below or file.name.startswith("step_"):
                    with suppress(FileNotFoundError):
                        found[name] = (file.stat().st_size, "")
                        found |= {} if below else self.files(name)
        return found

    def read(self, name: str) -> bytes:
        return (self._folder / name).read_bytes()

    def write(self, name: str, content: bytes) -> None:
        with whole(self._folder / name, durable=True, parents=False) as making:
            making.write_bytes(content)

    def delete(self, names: Iterable[str]) -> None:
        for path in map(self._folder.joinpath, names):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
