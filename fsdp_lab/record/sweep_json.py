"""The record of a sweep's start in its folder: writing it, and reading it at the next start.

| file | what |
| --- | --- |
| `sweep.json` | the command line, and the code and libraries; readable by its owner only |
| `trials.jsonl` | one line per trial: its overrides, in the order of the trials |
| `plain_loops.json` | what plain loops computed, with which its trials are compared |
| `plain_loop.log` | what they printed |
| `.lock` | locked while a driver works in the folder |
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from fsdp_lab.config import SweepConfig, UserError, from_dict, is_address, workers_of
from fsdp_lab.config.compose import Trial
from fsdp_lab.config.source_code import code_digest, commit, user_packages
from fsdp_lab.config.words import key_of
from fsdp_lab.record.paths import make_storage, name_storage
from fsdp_lab.record.trial_files import clear_left_over
from fsdp_lab.storage.files import sync, whole

_LAYOUT = 1  # version of the files in the folder; others are rejected
_LIBRARIES = ("torch", "ray")  # their versions change what a trial does


@dataclass(frozen=True)
class SweepStart:
    """The content of `sweep.json`.

    Attributes:
        arguments: as typed, without `-m`.
        multirun: whether it was started with `-m`.
        launched_in: the working directory of the start.
        num_workers: the number of ranks of a trial, with null resolved.
        code: the digest of the Python files of fsdp_lab and of the user's packages.
        commit: of fsdp_lab's checkout; "": it is installed.
        libraries: name -> version.
        num_trials: of a grid, which records all of them before it starts; None for a search.
        user_packages: the user's packages that targets name.
        begun: when it started, in seconds since 1970; 0: not known.
        layout: version of the files in the folder.
    """

    id: str
    arguments: list[str]
    multirun: bool
    launched_in: str
    num_workers: int
    code: str = ""
    commit: str = ""
    libraries: dict[str, str] = field(default_factory=dict)
    num_trials: int | None = None
    user_packages: list[str] = field(default_factory=list)
    begun: float = 0.0
    layout: int = _LAYOUT

    @staticmethod
    def of(arguments: Sequence[str], multirun: bool, config: SweepConfig) -> SweepStart:
        """Return the record of a new sweep, with the code as it is now."""
        own = (word for word in arguments if word not in ("-m", "--multirun"))
        typed = [word for word in own if not key_of(word).startswith("resume")]  # those are for one start only
        record = SweepStart(
            uuid.uuid4().hex, typed, multirun, os.getcwd(), workers_of(config), commit=commit(), libraries=versions(),
            begun=time.time(),
        )  # fmt: skip
        return record.with_code(config.code())

    def with_code(self, paths: Sequence[str]) -> SweepStart:
        """Return this record with the digest of fsdp_lab's code and of the user's code that dotted paths name."""
        packages = user_packages(paths)
        return replace(self, code=code_digest(packages), user_packages=packages)

    def write(self, folder: Path) -> None:
        """Write the record as the last file of a new sweep: once it exists, the sweep can be resumed."""
        if (folder / "trials.jsonl").exists():
            sync(folder / "trials.jsonl")
        with whole(folder / "sweep.json", durable=True) as making:
            making.touch(0o600)  # before it has content: a command line may be private
            making.write_text(json.dumps(asdict(self), indent=1))


def begin_folder(folder: Path, trials: Sequence[Trial]) -> None:
    """Remove an earlier sweep's record from this folder, then its trials' results."""
    (folder / "sweep.json").unlink(missing_ok=True)
    (folder / "trials.jsonl").unlink(missing_ok=True)
    (folder / "plain_loops.json").unlink(missing_ok=True)
    name_storage(folder, anew=any(is_address(trial.config.cluster.storage_path) for trial in trials))
    for trial in trials:
        clear_left_over(make_storage(trial, folder))


def versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in _LIBRARIES}


def read_start(folder: Path, key: str = "resume") -> SweepStart:
    """Return the record in a folder's `sweep.json`.

    Args:
        key: the key that names the folder on the command line.

    Raises:
        UserError: the file is missing, unreadable or no record, or from a version with other files.
    """
    path = folder / "sweep.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        record = from_dict(SweepStart, content)
    except FileNotFoundError:
        raise UserError(
            f"{key}={folder}: no sweep was started there (there is no {path.name}); give the folder that holds "
            f"results.csv, or {key}=last."
        ) from None
    except PermissionError:
        raise UserError(
            f"{key}={folder}: only its owner may read {path}; ask for a copy of the folder that you may read."
        ) from None
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{key}={folder}: {path} cannot be read ({error}); start a new sweep.") from None
    if content.get("layout") != _LAYOUT:
        raise UserError(
            f"{key}={folder}: another version of fsdp_lab started this sweep, and keeps its trials in other files; "
            "use that version, or start a new sweep."
        )
    return record
