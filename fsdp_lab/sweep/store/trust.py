"""The owner of a sweep's folder, and how far its content is trusted.

A resume unpickles the folder's checkpoints and composes its arguments, and a report opens the store that it names. So
the
folder must be this user's own, or the command line must say `trust=true`; its arguments are checked in either case.
"""

from __future__ import annotations

import grp
import json
import os
import pwd
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from fsdp_lab.config import ConfigError, UserError, is_address
from fsdp_lab.record.paths import copy_of
from fsdp_lab.redact import redact
from fsdp_lab.sweep.store.override_rules import Known, key_of, known_words, leads_away, names_code, refusal

_OTHERS_ENTER, _OTHERS_WRITE, _GROUP_WRITES = 0o011, 0o002, 0o020


def read_trust(value: str | None) -> bool:
    """Return the value of `trust=`; False without one.

    Raises:
        ConfigError: neither true nor false.
    """
    if value not in (None, "true", "false"):
        raise ConfigError(f"trust={value} is not a boolean; use true or false.")
    return value == "true"


def is_own(folder: Path, key: str, trust: bool) -> bool:
    """Return whether a sweep's folder, with its files on a shared disk, is this user's.

    False if it is another user's and trusted.

    Args:
        folder: the sweep's.
        key: the key that named the folder on the command line.
        trust: `trust=true` was typed.

    Raises:
        UserError: it is another user's, or others may write into it, and it is not trusted.
    """
    reason = why_foreign(folder)
    if reason is None:  # what it says of its other folders is this user's word by now
        reason = next((why for where in _elsewhere(folder) if (why := why_foreign(where))), None)
    if reason is None and (address := copy_of(folder)):
        reason = f"it is a copy of {address}"
    if reason is None:
        return True
    if not trust:
        raise UserError(
            f"{key}={folder}: {reason}, and a sweep's folder can run code as you (its checkpoints are pickles). Use "
            "your own folder; or, if you trust everybody who can write there, add trust=true."
        )
    return False


def check_address_trusted(named: str, key: str, trust: bool) -> None:
    """Refuse a sweep in object storage before it is read: it is not known who may write there.

    Raises:
        UserError: it is not trusted.
    """
    if is_address(named) and not trust:
        raise UserError(
            f"{key}={named}: everybody who can write there can run code as you (a sweep's checkpoints are pickles); if "
            "you trust them, add trust=true."
        )


def why_foreign(folder: Path) -> str | None:
    """Return who else may have written into a folder, or which link leads out of it; None if only this user, or root.

    A group may write if it is the user's private one: of the same name, with no other member (umask 002). Files below a
    folder that nobody else can enter may have any mode.
    """
    others_enter = bool(folder.stat().st_mode & _OTHERS_ENTER)
    for path in _all_in(folder):
        if reason := _who_else(path, others_enter or path == folder) or _leads_out(path, folder):
            return reason
    return None


def check_store(uri: str, launched_in: str) -> None:
    """Check who can write a store in a file that another user's folder, or the default, names.

    The store names the location of its runs' files, which may be an address.

    Raises:
        ConfigError: others may have written it.
    """
    file = Path(launched_in, uri.replace("\\", "").strip("'\"").removeprefix("sqlite:///"))
    if reason := _who_else(file.parent) or _who_else(file):
        raise ConfigError(f"tracking.uri={redact(uri)}: {reason}; add tracking.uri=... with a store of your own.")


def check_words(
    words: Sequence[Any], source: Path, key: str, own: bool, known: Known | None = None, shown: Sequence[Any] = ()
) -> None:
    """Check the arguments in a file of a sweep's folder for Hydra, and show in one line those that name code to run.

    Args:
        words: the arguments.
        source: the file.
        key: see `is_own`.
        own: whether the folder is this user's.
        known: keys and groups; None: those of this version.
        shown: arguments of another file that were shown already.

    Raises:
        ConfigError: an argument is accepted from no file, or not from this one.
    """
    known = known or known_words()
    for word in words:
        reason = refusal(word, known, own)
        if reason is None and not own and leads_away(word):
            reason = "only a folder of your own may set an address"
        if reason is not None:
            again = word if str(word).startswith("-") else f"{key_of(str(word))}=..."
            raise ConfigError(
                f"{key}={source.parent}: {source.name} holds {redact(str(word))}, and {reason}. If you want it, add it "
                f"to the command after {key}=...: {again}"
            )
    code = dict.fromkeys(redact(word) for word in words if names_code(word, known) and word not in shown)
    if code:
        print(f"runs your code, which {source} names: {', '.join(code)}", flush=True)


def enter(folder: str) -> None:
    """Change to a folder, so that relative paths mean what they meant there.

    Its modules must not be imported, here or in a process that is started from here.
    """
    typed = os.getcwd()
    sys.path[:] = [os.path.join(typed, path) for path in sys.path]
    if "PYTHONPATH" in os.environ:  # an empty part of it is the folder that a process starts in
        paths = os.environ["PYTHONPATH"].split(os.pathsep)
        os.environ["PYTHONPATH"] = os.pathsep.join(os.path.join(typed, path) for path in paths)
    os.environ["PYTHONSAFEPATH"] = "1"
    os.chdir(folder)


def _who_else(path: Path, others_enter: bool = True) -> str | None:
    try:
        status = path.stat()
    except OSError:  # it went away, or is a link to nothing
        return None
    if status.st_uid not in (os.geteuid(), 0):
        return f"{path} belongs to {_user(status.st_uid)}"
    group_writes = status.st_mode & _GROUP_WRITES and not _is_private_group(status.st_gid)
    if (status.st_mode & _OTHERS_WRITE or group_writes) and others_enter:
        return f"others can write into {path} (`chmod -R go-w` prevents it)"
    return None


def _leads_out(path: Path, folder: Path) -> str | None:
    """Return which link leads out of a folder; None without one.

    A folder may be on another disk. A file elsewhere would be appended to, or made.
    """
    if path == folder or not path.is_symlink() or path.is_dir():
        return None
    target = path.resolve()
    return None if target.is_relative_to(folder.resolve()) else f"{path} is a link to {target}, outside the folder"


def _all_in(folder: Path) -> Iterator[Path]:
    yield folder
    for where, folders, files in os.walk(folder):
        yield from (Path(where, name) for name in (*folders, *files))


def _elsewhere(folder: Path) -> Iterator[Path]:
    """Yield the folders that a sweep names outside its own: its trials', and those below `cluster.storage_path`."""
    with suppress(OSError, ValueError):
        for line in (folder / "trials.jsonl").read_text(errors="replace").splitlines():
            with suppress(ValueError, KeyError, TypeError):
                content = json.loads(line)
                for where in (folder / content["folder"], Path(content.get("storage", folder))):
                    if where.is_dir() and not where.resolve().is_relative_to(folder.resolve()):
                        yield where
    launched_in = ""
    with suppress(OSError, ValueError, KeyError, TypeError):
        launched_in = str(json.loads((folder / "sweep.json").read_text())["launched_in"])
    with suppress(OSError, KeyError, TypeError, yaml.YAMLError):  # of a trial alone
        saved = yaml.load((folder / ".hydra" / "config.yaml").read_text(), Loader=yaml.CSafeLoader)
        where = Path(launched_in, saved["cluster"]["storage_path"], (folder / ".storage").read_text())
        if where.is_dir():
            yield where


def _user(number: int) -> str:
    with suppress(KeyError):
        return f"user {pwd.getpwuid(number).pw_name}"
    return f"user {number}"


@cache
def _is_private_group(number: int) -> bool:
    try:
        group, user = grp.getgrgid(number), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
