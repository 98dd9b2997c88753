"""Names of modules as a user knows them."""

from __future__ import annotations


def plain_name(name: str) -> str:
    """Return a module's name without what DDP puts before it."""
    return name.removeprefix("module.")
