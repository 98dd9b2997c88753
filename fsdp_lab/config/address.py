"""Addresses of object storage, as `cluster.storage_path` and `resume` take them. Pure: nothing is reached."""

from __future__ import annotations

import re

from fsdp_lab.config.errors import ConfigError

# What reads and writes an address, as fsspec knows it: scheme -> (module, extra that installs it).
SCHEMES = {"s3": ("s3fs", "s3"), "gs": ("gcsfs", "gs")}
_ADDRESS = re.compile(r"\w+://[\w.-]+(/[\w.=+-]+)*")  # a bucket and folders; no user, no query, no `//`


def is_address(place: str | None) -> bool:
    """Whether a place is an address, and not a folder."""
    return place is not None and "://" in place


def scheme_of(address: str) -> str:
    """Return what stands before `://`."""
    return address.partition("://")[0]


def check_address(key: str, address: str) -> None:
    """
    Args:
        key: what the address was given to, for messages.

    Raises:
        ConfigError: it is of no object storage that is known, or holds more than a bucket and folders in it.
    """
    scheme = scheme_of(address)
    known = ", ".join(f"{name}://bucket/prefix" for name in SCHEMES)
    if scheme in ("file", "local"):
        raise ConfigError(f"{key}={address}: a mounted folder is given as its path, without {scheme}://.")
    if scheme == "memory":
        raise ConfigError(f"{key}={address}: memory ends with its process; give a mounted folder, or {known}.")
    if "@" in address or "?" in address:  # not repeated: it may hold a password
        raise ConfigError(
            f"{key}: its {scheme}:// address holds more than a bucket and a prefix; credentials come from the "
            "environment, ~/.aws or the machine's role, options from AWS_ENDPOINT_URL and its like."
        )
    if scheme not in SCHEMES:
        raise ConfigError(f"{key}={address}: no storage is known by {scheme}://; give a mounted folder, or {known}.")
    if not _ADDRESS.fullmatch(address):
        raise ConfigError(
            f"{key}={address} is no address of a bucket and a prefix; write it as {scheme}://bucket/prefix, of "
            "letters, digits and ._=+-, without a slash at the end."
        )
