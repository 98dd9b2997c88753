"""Object storage: whole objects below an address, through fsspec.

A store has no rename, no append and no lock. It guarantees that an object is either whole or absent, and that a reader
sees the last one that was put. What is written to it, and in which order, is in docs/durability.md.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsdp_lab.config.address import scheme_of
from fsdp_lab.config.errors import UserError

# An object's size, and what changes when it is put again.
Stamp = tuple[int, str]
_STAMPS = ("ETag", "LastModified", "etag", "updated", "mtime")  # by the names of s3fs and gcsfs
_PROBE = ".fsdp_lab"
_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound")


class StorageRefused(UserError):
    """The store answers, and does not let this user do it."""


class StorageAway(OSError):
    """The store does not answer, for longer than requests are repeated."""


class Storage:
    """The objects below an address. Their names have slashes, but none at the start.

    Every method raises StorageRefused and StorageAway.
    """

    def __init__(self, address: str) -> None:
        from fsspec.core import url_to_fs

        self.address = address
        with _translated_errors(address):
            self._fs, self._root = url_to_fs(address, **options(address))

    def put(self, file: Path, name: str) -> None:
        """Upload a local file. A large object exists once all of it has arrived."""
        with _translated_errors(self.address):
            self._fs.put_file(str(file), f"{self._root}/{name}")

    def write(self, name: str, content: bytes) -> None:
        try:
            with _translated_errors(self.address):
                self._fs.pipe_file(f"{self._root}/{name}", content)
        except FileNotFoundError as error:  # gcsfs raises this
            raise _no_bucket(self.address) from error

    def read(self, name: str) -> bytes:
        """Return the content of an object.

        Raises:
            FileNotFoundError: there is no such object.
        """
        with _translated_errors(self.address):
            return bytes(self._fs.cat_file(f"{self._root}/{name}"))

    def get(self, name: str, file: Path) -> None:
        """Download an object to a local file, whole or not at all. Raises as `read`."""
        making = file.with_name(f".{file.name}.{os.getpid()}.making")
        try:
            with _translated_errors(self.address):
                self._fs.get_file(f"{self._root}/{name}", str(making))
            making.rename(file)
        finally:
            making.unlink(missing_ok=True)

    def files(self, below: str = "") -> dict[str, Stamp]:
        """Return the objects, by name, with their sizes and versions."""
        with _translated_errors(self.address):
            objects: dict[str, dict[str, Any]] = self._fs.find(f"{self._root}/{below}".rstrip("/"), detail=True)
        return {
            path.removeprefix(f"{self._root}/"): (int(info["size"]), " ".join(str(info.get(key)) for key in _STAMPS))
            for path, info in objects.items()
            if path.startswith(f"{self._root}/")
        }

    def delete(self, names: Iterable[str]) -> None:
        """Remove objects; missing ones are no error."""
        for name in names:
            with _translated_errors(self.address):
                try:
                    self._fs.rm_file(f"{self._root}/{name}")
                except FileNotFoundError:
                    continue


def check_access(address: str) -> None:
    """Put an object below an address and delete it.

    Raises:
        UserError: the store refuses, or does not answer.
    """
    try:
        storage = Storage(address)
        storage.write(_PROBE, b"")
        storage.delete([_PROBE])
    except StorageAway as error:
        raise UserError(f"cluster.storage_path={error}.") from error


def options(address: str) -> dict[str, Any]:
    """Return the arguments of fsspec's file system for an address.

    Listings are not cached, because others write there too. S3's requests are repeated for about a minute, unless the
    environment sets how often.
    """
    if scheme_of(address) != "s3":
        return {"use_listings_cache": False}
    settings: dict[str, Any] = {"connect_timeout": 10, "read_timeout": 60}
    if not {"AWS_MAX_ATTEMPTS", "AWS_RETRY_MODE"} & os.environ.keys():
        settings["retries"] = {"mode": "standard", "max_attempts": 10}
    return {"use_listings_cache": False, "config_kwargs": settings}


@contextmanager
def _translated_errors(address: str) -> Iterator[None]:
    """Translate errors of a store's client into ours: each client has its own."""
    try:
        yield
    except PermissionError as error:
        raise StorageRefused(
            f"{address}: the store refuses access ({_first_line(error)}); give it credentials that may list, read, "
            "write and delete below that address. They come from the environment, ~/.aws or the machine's role."
        ) from error
    except FileNotFoundError as error:
        if _code(error) == "NoSuchBucket":
            raise _no_bucket(address) from error
        raise
    except Exception as error:
        if type(error).__name__ in _NO_CREDENTIALS:
            raise StorageRefused(
                f"{address}: no credentials were found ({_first_line(error)}); provide them in the environment, ~/.aws "
                "or the machine's role, on every node."
            ) from error
        raise StorageAway(f"{address}: the store does not answer ({_first_line(error)})") from error


def _no_bucket(address: str) -> StorageRefused:
    return StorageRefused(f"{address}: this bucket does not exist; create it, or name another one.")


def _code(error: BaseException) -> str | None:
    """Return S3's name of the error that s3fs translated into this one; None without one."""
    response = getattr(error.__cause__, "response", {})
    return response.get("Error", {}).get("Code")  # type: ignore[no-any-return]


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
