"""Find the folder of a sweep that a command names, its owner, and the overrides that a resume composes.

A resume unpickles the folder's checkpoints, and imports the code that its overrides name. So the folder must be this
user's own, or the command line must say `trust=true`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from fsdp_lab.config import ConfigError, SweepConfig, UserError
from fsdp_lab.config.key import keys_of
from fsdp_lab.config.options import OPEN_GROUPS, groups
from fsdp_lab.config.words import key_of
from fsdp_lab.record.trials_jsonl import lines_of
from fsdp_lab.storage.files import write_text

_LAST = Path("outputs/last_sweep")  # the folder that `resume=last` stands for, seen from where commands are typed
_HYDRA_KEYS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir")
_AXIS = "hydra.sweeper.params."  # a default axis: a key of the trial follows
_USERS_KEY = re.compile(rf"({'|'.join(OPEN_GROUPS)})\.[\w.]+")


def remember_last(folder: Path) -> None:
    """Make `resume=last` stand for this folder."""
    with suppress(OSError):
        _LAST.parent.mkdir(exist_ok=True)
        write_text(_LAST, str(folder.absolute()))


def _find_folder(named: str, key: str) -> Path:
    if named == "last":
        with suppress(OSError):
            last = Path(_LAST.read_text(errors="replace").strip())
            if last.is_absolute() and last.is_dir():
                return last
        raise UserError(
            f"{key}=last: no sweep was started from this folder, or {_LAST} is damaged, or the sweep was moved; "
            "give the sweep's own folder."
        )
    if not named or not os.path.isdir(named):  # `Path.is_dir` raises for one that this user may not reach
        raise UserError(f"{key}={named} is not a folder that you may read; give the sweep's folder, or {key}=last.")
    return Path(named).absolute()


def read_trust(value: str | None) -> bool:
    """Return the value of `trust=`; False without one.

    Raises:
        ConfigError: neither true nor false.
    """
    if value not in (None, "true", "false"):
        raise ConfigError(f"trust={value} is not a boolean; use true or false.")
    return value == "true"


def find_trusted(named: str, key: str, trust: bool) -> tuple[Path, bool]:
    """Return the folder of a sweep, and whether it is this user's own.

    Args:
        key: the key that names the sweep on the command line.
        trust: `trust=true` was typed.

    Raises:
        UserError: there is no such folder, or others may have written into it and it is not trusted.
    """
    folder = _find_folder(named, key)
    reason = why_foreign(folder)
    if reason is not None and not trust:
        raise UserError(
            f"{key}={folder}: {reason}, and a sweep's folder can run code as you (its checkpoints are pickles). Use "
            "your own folder; or, if you trust everybody who can write there, add trust=true."
        )
    return folder, reason is None


def why_foreign(folder: Path) -> str | None:
    """Return who else may have written into a sweep's folder, or its trials' on a shared disk; None: only this user."""
    for place in (folder, *(Path(line["storage"]) for line in lines_of(folder) if "storage" in line)):
        with suppress(OSError, ValueError):  # it was removed, is in object storage, or no path
            if place.stat().st_uid not in (os.geteuid(), 0):
                return f"{place} belongs to user {place.stat().st_uid}"
            if place.stat().st_mode & 0o022:
                return f"others can write into {place} (`chmod go-w` prevents it)"
    return None


def check_keys(words: Sequence[str], source: Path) -> None:
    """Check that the overrides in a file of a sweep's folder set keys of trials: Hydra runs what its own keys name.

    Raises:
        ConfigError: one of them must be typed again.
    """
    known = {*_HYDRA_KEYS, *groups(), *(key for key in keys_of(SweepConfig) if not key.startswith("resume"))}
    for word in words:
        if (key := key_of(word).removeprefix(_AXIS)) not in known and not _USERS_KEY.fullmatch(key):
            again = word if word.startswith("-") else f"{key_of(word)}=..."
            raise ConfigError(
                f"resume={source.parent}: {source.name} holds {key_of(word)}, which is no key of a trial. Remove it "
                f"there; if you want it, add it to the command after resume=...: {again}"
            )
