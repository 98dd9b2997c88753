"""Real control groups of version 1, for processes that are to be limited as a container's are."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def group(controller: str, **limits: int) -> Iterator[Path]:
    """A control group of version 1, for processes that write their number into its `cgroup.procs`."""
    folder = Path("/sys/fs/cgroup", controller, f"fsdp_lab_test_{os.getpid()}")
    try:
        folder.mkdir()
        for name, value in limits.items():
            (folder / f"{controller}.{name}").write_text(str(value))
    except OSError as error:
        with suppress(OSError):
            folder.rmdir()
        pytest.skip(f"no control group of version 1 can be made here: {error}")
    try:
        yield folder
    finally:
        folder.rmdir()


def enter(folder: Path) -> None:
    (folder / "cgroup.procs").write_text(str(os.getpid()))
