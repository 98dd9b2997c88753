"""The folder of a new sweep: one that no other process uses, without results of another sweep."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path

from omegaconf import DictConfig

from fsdp_lab.config import ConfigError, UserError
from fsdp_lab.storage.locks import InUse, locked
from fsdp_lab.sweep.names import relative, resume_command

_ROOM = 200  # bytes of a path for the files below a trial's folder
_OF_THE_SWEEP = (
    *("sweep.json", "trials.jsonl", "multirun.yaml", "results.csv", "report.html", ".lock", ".storage"),
    *("plain_loops.json", "plain_loop.log"),
)


class Occupied(UserError):
    """The folder holds the results of another start."""


def check_trial_folders(sweep_folder: Path, folders: Sequence[Path]) -> None:
    """Check that each trial has a folder of its own, below its sweep's, with a name that the disk accepts.

    Args:
        folders: in the order of the trials' numbers.

    Raises:
        ConfigError: with the key that names them.
    """
    top = Path(os.path.realpath(sweep_folder))  # `Path.resolve` raises for links in a loop
    disk = next(folder for folder in (top, *top.parents) if folder.is_dir())
    longest_name, longest_path = (os.pathconf(disk, limit) for limit in ("PC_NAME_MAX", "PC_PATH_MAX"))
    owners: dict[str, int] = {}
    places = [Path(os.path.realpath(folder)) for folder in folders]
    for number, place in enumerate(places):
        if place == top or not place.is_relative_to(top) or place.relative_to(top).parts[0] in _OF_THE_SWEEP:
            raise _refused(f"trial {number} the folder {place}, which is not one of its own below {top}")
        if max(len(os.fsencode(part)) for part in place.parts) > longest_name:
            raise _refused(f"trial {number} a name of more than {longest_name} bytes, the longest that this disk takes")
        if len(os.fsencode(place)) > longest_path - _ROOM:
            raise _refused(f"trial {number} a path of more than {longest_path - _ROOM} bytes, too long for its files")
        if (other := owners.setdefault(_key(place), number)) != number:
            raise _refused(f"trials {other} and {number} the same folder, {place} (capitals do not count)")
    for number, place in enumerate(places):
        if above := [owners[_key(parent)] for parent in place.parents if _key(parent) in owners]:
            raise _refused(f"trial {number} a folder inside that of trial {above[0]}, {place}")


def _key(place: Path) -> str:
    return str(place).casefold()  # some disks ignore case


def _refused(what: str) -> ConfigError:
    return ConfigError(
        f"hydra.sweep.subdir gives {what}; leave it out, or use a name with the trial's number in it, as in "
        "hydra.sweep.subdir='trial-${hydra.job.num}'."
    )


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
    pattern = "**/trial.json" if (folder / "trials.jsonl").exists() else "*/trial.json"  # else it may be any folder
    if not any((folder / name).exists() for name in ("results.csv", "trial.json")) and not any(folder.glob(pattern)):
        return
    resuming = f" To resume it: {resume_command(folder)}." if (folder / "sweep.json").exists() else ""
    raise Occupied(
        f"{key}={relative(folder)} holds results, which would be lost.{resuming} To start a new sweep or run, name "
        f"another folder: {key}=..."
    )
