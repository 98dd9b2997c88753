"""The folder of a new sweep: one that no other process uses, without results of another sweep."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path

from omegaconf import DictConfig

from fsdp_lab.config import UserError
from fsdp_lab.locks import InUse, locked
from fsdp_lab.sweep.names import relative, resume_command


class Occupied(UserError):
    """The folder holds the results of another start."""


@contextmanager
def new_folder(planned: Path, key: str, hydra: DictConfig) -> Iterator[Path]:
    """Lock the folder of a new sweep, and yield its path.

    If a default folder is taken, as by a sweep that was started in the same second, the new one gets a number:
    `14-05-09-2`.

    Args:
        key: the key that sets the folder on the command line.
        hydra: Hydra's own part of the config.

    Raises:
        InUse: the folder was typed, and another process uses it.
        Occupied: the folder was typed, and holds another sweep.
        UserError: see `locked`.
    """
    typed = any(str(word).startswith(f"{key}=") for word in hydra.overrides.hydra)
    with ExitStack() as held:
        for number in count(1):
            folder = planned if number == 1 else planned.with_name(f"{planned.name}-{number}")
            try:
                held.enter_context(locked(folder, key, private=True))
                _check_free(folder, key)
                break
            except (InUse, Occupied):
                if typed:
                    raise
                held.close()
        yield folder


def _check_free(folder: Path, key: str) -> None:
    """Check that a folder holds no sweep. One that was refused at its start has left only files that are rewritten."""
    if not any((folder / name).exists() for name in ("results.csv", "facts.json")) and not any(
        folder.glob("*/facts.json")
    ):
        return
    resuming = f" To resume it: {resume_command(folder)}." if (folder / "sweep.json").exists() else ""
    raise Occupied(
        f"{key}={relative(folder)} holds results, which would be lost.{resuming} To start a new sweep or run, name "
        f"another folder: {key}=..."
    )
