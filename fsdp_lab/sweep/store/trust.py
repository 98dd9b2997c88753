"""The owner of a sweep's folder, and what of its content is used.

A resume unpickles the folder's checkpoints, and composes its overrides, which may name code and addresses. So the
folder must be this user's own, or the command line must say `trust=true`. Its overrides are checked in either case.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser

from fsdp_lab.config import ConfigError, SweepConfig, UserError, is_address
from fsdp_lab.config.conf import groups
from fsdp_lab.config.key import keys_of
from fsdp_lab.config.key_value_args import key_of
from fsdp_lab.config.options import names_code
from fsdp_lab.deploy.job import is_managers
from fsdp_lab.record.paths import copy_of
from fsdp_lab.record.trials_jsonl import lines_of
from fsdp_lab.redact import redact
from fsdp_lab.sweep.grid import discrete_values
from fsdp_lab.sweep.store.find import find_folder

_HYDRA_KEYS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir")
_AXIS = "hydra.sweeper.params."  # a default axis: an override follows
_USERS_KEY = re.compile(r"(model|data)\.[\w.]+")
_OPTIONS = re.compile(r"[\w\s,'\"()\[\]*=-]*")  # names and choices of them; no path, which would be a file anywhere
_RESOLVERS = (None, "per_worker", "now", "hydra", "oc.env")  # None: the interpolation of a key
_INTERPOLATION = re.compile(r"\$\{(?:\s*(?:[\w.\[\]]+\s*\}|(?P<resolver>\w+(?:\.\w+)*)\s*:))?")


def read_trust(value: str | None) -> bool:
    """Return the value of `trust=`; False without one.

    Raises:
        ConfigError: neither true nor false.
    """
    if value not in (None, "true", "false"):
        raise ConfigError(f"trust={value} is not a boolean; use true or false.")
    return value == "true"


def find_trusted(named: str, key: str, trust: bool) -> tuple[Path, bool]:
    """Return the folder of a sweep, and whether it is this user's own with its files on a shared disk.

    Args:
        named: see `find_folder`.
        key: the key that names the sweep on the command line.
        trust: `trust=true` was typed.

    Raises:
        UserError: there is no such folder, or others may have written into it and it is not trusted.
    """
    where, reason = named, "it is not known who can write there" if is_address(named) else None
    if trust or reason is None:
        folder = find_folder(named, key)
        where, reason = str(folder), why_foreign(folder)
    if reason is not None and not trust:
        raise UserError(
            f"{key}={where}: {reason}, and a sweep's folder can run code as you (its checkpoints are pickles). Use "
            "your own folder; or, if you trust everybody who can write there, add trust=true."
        )
    return folder, reason is None


def why_foreign(folder: Path) -> str | None:
    """Return who else may have written into a sweep's folder; None: only this user.

    Everything in it, and in what it keeps on a shared disk, must belong to this user or to root. Files in it may have
    any mode: with an umask that lets others write them, others can also write the code that a resume imports.
    """
    for path in _all_of(folder):
        with suppress(OSError):  # it went away, or is a link to nothing
            if (owner := path.stat().st_uid) not in (os.geteuid(), 0):
                return f"{path} belongs to {_user(owner)}"
    if folder.stat().st_mode & 0o022:
        return f"others can write into {folder} (`chmod go-w` prevents it)"
    address = copy_of(folder)
    return f"it is a copy of {address}" if address else None


def why_refused(word: str) -> str | None:
    """Return why a resume composes an override only if it is typed again; None if a folder may hold it.

    Hydra runs what a configuration tells it to. So an override of a folder sets a key of the trial, or names an option.
    """
    word = word.replace("\\", "")  # as Hydra will read it: an escape must hide nothing
    key, value = key_of(word).removeprefix(_AXIS), word.partition("=")[2]
    if key in groups():
        return None if _OPTIONS.fullmatch(value) else f"a file may only name options of {key}"
    if key not in _trial_keys() and not _USERS_KEY.fullmatch(key):
        return f"a file may set only keys of a trial, {', '.join(_HYDRA_KEYS)} and {_AXIS}*"
    if any(match[0] == "${" or match["resolver"] not in _RESOLVERS for match in _INTERPOLATION.finditer(word)):
        return f"a file may interpolate only keys and {', '.join(filter(None, _RESOLVERS))}"
    return None


@cache
def _trial_keys() -> frozenset[str]:
    """Return the keys that a folder may set.

    They are not those of a resume, nor of a cluster manager, but for the nodes that a sweep awaits.
    """
    keys = (key for key in keys_of(SweepConfig) if not is_managers(key) or key == "cluster.job.nodes")
    return frozenset([*(key for key in keys if not key.startswith("resume")), *_HYDRA_KEYS])


def check_words(words: Sequence[str], source: Path) -> None:
    """Check the overrides in a file of a sweep's folder.

    Raises:
        ConfigError: one of them must be typed again.
    """
    for word in words:
        if reason := why_refused(word):
            again = word if word.startswith("-") else f"{key_of(word)}=..."
            raise ConfigError(
                f"resume={source.parent}: {source.name} holds {redact(word)}, and {reason}. If you want it, add it to "
                f"the command after resume=...: {again}"
            )


def print_code(words: Sequence[str], folder: Path) -> None:
    """Print in one line which overrides of a folder name code to run."""
    parsed = OverridesParser.create().parse_overrides([word for word in words if names_code([word])])
    if code := dict.fromkeys(redact(value) for override in parsed for value in discrete_values(override)):
        print(f"runs your code, which {folder} names: {', '.join(code)}", flush=True)


def _all_of(folder: Path) -> Iterator[Path]:
    """Yield what is in a sweep's folder, then what is in the folders of its trials elsewhere."""
    yield from _all_in(folder)
    for line in lines_of(folder):
        for place in (folder / line.get("folder", "."), Path(line.get("storage", folder))):
            yield from () if place.resolve().is_relative_to(folder.resolve()) else _all_in(place)


def _all_in(folder: Path) -> Iterator[Path]:
    yield folder
    for where, folders, files in os.walk(folder):
        yield from (Path(where, name) for name in (*folders, *files))


def _user(number: int) -> str:
    with suppress(KeyError):
        return f"user {pwd.getpwuid(number).pw_name}"
    return f"user {number}"
