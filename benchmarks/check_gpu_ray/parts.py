"""A set of wheels, packed into parts that travel one by one. Standard library only, and `fsdp_lab.files`: the target
machine runs this before anything is installed.

A set is `manifest.json` and `wheels-<id>-<n>-of-<count>.part`; the parts, joined, are a tar file of the wheels.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fsdp_lab.files import write_text

MANIFEST = "manifest.json"
_PART = re.compile(r"wheels-([0-9a-f]{8})-\d+-of-\d+\.part")
_CHUNK = 1 << 20


class DamagedError(Exception):
    """Files whose content differs from the manifest; `names` lists them."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(", ".join(names))
        self.names = list(names)


@dataclass(frozen=True)
class Entry:
    """A file of the set."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a set consists of. `id` is derived from the wheels, so the same wheels give the same parts."""

    id: str
    about: dict[str, Any]
    parts: list[Entry]
    wheels: list[Entry]

    def write(self, folder: Path) -> None:
        write_text(folder / MANIFEST, json.dumps(asdict(self), indent=1) + "\n")

    @staticmethod
    def read(path: Path) -> Manifest:
        """Raises: ValueError: the file is not a manifest."""
        try:
            content = json.loads(path.read_text())
            parts, wheels = ([Entry(**entry) for entry in content[key]] for key in ("parts", "wheels"))
            return Manifest(content["id"], content["about"], parts, wheels)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not the manifest of a set of wheels: {error!r}") from error


def set_id(name: str) -> str | None:
    """The set that a part belongs to, by its file name; None for any other file."""
    match = _PART.fullmatch(name)
    return match[1] if match else None


def entry_of(path: Path) -> Entry:
    with path.open("rb") as file:
        return Entry(path.name, path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def matches(path: Path, entry: Entry) -> bool:
    """Whether the file is there with the content that the manifest says."""
    return path.is_file() and path.stat().st_size == entry.bytes and entry_of(path).sha256 == entry.sha256


def pack(wheels: Iterable[Path], folder: Path, part_bytes: int, about: dict[str, Any]) -> Manifest:
    """Pack the wheels into parts in `folder`, with their manifest. Parts of an earlier set are removed."""
    ordered = sorted(wheels, key=lambda path: path.name)
    entries = [entry_of(path) for path in ordered]
    identity = hashlib.sha256("".join(f"{e.name}\0{e.sha256}\n" for e in entries).encode()).hexdigest()[:8]
    for old in (*folder.glob("wheels-*.part"), folder / MANIFEST):
        old.unlink(missing_ok=True)
    archive = folder / ".wheels.tar.making"
    with tarfile.open(archive, "w") as tar:
        for path in ordered:
            member = tarfile.TarInfo(path.name)  # no time, no owner: the same wheels give the same bytes
            member.size = path.stat().st_size
            with path.open("rb") as file:
                tar.addfile(member, file)
    parts = split(archive, folder, f"wheels-{identity}", part_bytes)
    archive.unlink()
    manifest = Manifest(identity, about, [entry_of(part) for part in parts], entries)
    manifest.write(folder)
    return manifest


def split(archive: Path, folder: Path, prefix: str, part_bytes: int) -> list[Path]:
    """Cut the file into parts of at most `part_bytes`."""
    count = max(1, -(-archive.stat().st_size // part_bytes))
    digits = len(str(count))
    parts = [folder / f"{prefix}-{number:0{digits}}-of-{count}.part" for number in range(1, count + 1)]
    with archive.open("rb") as source:
        for part in parts:
            left = part_bytes
            with part.open("wb") as out:
                while left and (chunk := source.read(min(_CHUNK, left))):
                    out.write(chunk)
                    left -= len(chunk)
    return parts


class Joined(io.RawIOBase):
    """Several files, read as one."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = iter(paths)
        self._file: io.BufferedReader | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            if self._file is None:
                path = next(self._paths, None)
                if path is None:
                    return 0
                self._file = path.open("rb")
            if count := self._file.readinto(buffer):
                return count
            self._file.close()
            self._file = None


def unpack(manifest: Manifest, staging: Path, folder: Path) -> list[Path]:
    """Join the parts in `staging` and write the wheels to `folder`; returns their paths.

    Raises:
        DamagedError: parts or wheels whose checksum differs. Damaged parts are removed, to be copied again.
    """
    if damaged := [part.name for part in manifest.parts if not matches(staging / part.name, part)]:
        for name in damaged:
            (staging / name).unlink(missing_ok=True)
        raise DamagedError(damaged)
    folder.mkdir(parents=True, exist_ok=True)
    expected = {wheel.name for wheel in manifest.wheels}
    with tarfile.open(
        fileobj=io.BufferedReader(Joined(staging / part.name for part in manifest.parts)), mode="r|"
    ) as tar:
        for member in tar:
            source = tar.extractfile(member)
            if member.name not in expected or source is None:
                raise DamagedError([member.name])
            with (folder / member.name).open("wb") as out:
                shutil.copyfileobj(source, out)
    if damaged := [wheel.name for wheel in manifest.wheels if not matches(folder / wheel.name, wheel)]:
        raise DamagedError(damaged)
    return [folder / wheel.name for wheel in manifest.wheels]
