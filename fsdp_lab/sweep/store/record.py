"""What a sweep leaves in its folder, and how the next start understands it.

| file | what |
| --- | --- |
| `sweep.json` | what was typed, and with which code and libraries; for its owner alone |
| `trials.jsonl` | a line a trial: its overrides without passwords, in the order of the trials |
| `.lock` | locked while a driver works in the folder |
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

import fsdp_lab
from fsdp_lab.compose import Trial, groups
from fsdp_lab.config import (
    Between,
    ConfigError,
    NightlyConfig,
    SweepConfig,
    UserError,
    from_dict,
    is_address,
    part,
    settings,
    workers_of,
)
from fsdp_lab.config.key import keys_of
from fsdp_lab.config.sweep import TrackingConfig
from fsdp_lab.config.target import file_digest, source_digests
from fsdp_lab.engine.files import append_line, clear_left_over
from fsdp_lab.files import report_damaged, sync, whole, write_text
from fsdp_lab.redact import redact, redact_strings
from fsdp_lab.storage import Storage
from fsdp_lab.sweep.store.fetch import fetch_sweep
from fsdp_lab.sweep.store.passwords import config_to_write, resolved, words_to_write
from fsdp_lab.sweep.store.paths import is_storage_of, make_storage, name_storage, storage, trial_address
from fsdp_lab.sweep.store.words import key_of

_LAST = Path("outputs/last_sweep")  # the folder that `resume=last` stands for, seen from where commands are typed
# Set while a resume works in another folder than the one it was typed in.
TYPED_ELSEWHERE = "FSDP_LAB_TYPED_ELSEWHERE"
_OF_CHECKPOINTS = re.compile(r"checkpoints/.+|model/.+|model\.pt")  # objects of a trial
_ANY_CHECKPOINT = re.compile(r"(^|/)checkpoints/")
_MOST_NAMED = 10  # of trials that are missing: a number may be damaged, too
_LIBRARIES = ("torch", "ray")  # what else decides what a trial does


@dataclass(frozen=True)
class Record:
    """`sweep.json`. `arguments`: as typed, without `-m`; `num_workers`: what null stood for; `code`: file -> digest;
    `num_trials`: of a grid, all of which are written down before it starts; None for a search, and from versions that
    did not count. `user_code`: file -> digest, of the packages that targets name, as seen from `launched_in`."""

    id: str
    arguments: list[str]
    multirun: bool
    launched_in: str
    num_workers: int
    code: dict[str, str] = field(default_factory=dict)
    libraries: dict[str, str] = field(default_factory=dict)
    num_trials: int | None = None
    user_code: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def of(arguments: Sequence[str], multirun: bool, config: SweepConfig) -> Record:
        """A new sweep's, with the code as it is now."""
        typed = [argument for argument in arguments if argument not in ("-m", "--multirun")]
        workers = workers_of(config)
        record = Record(uuid.uuid4().hex, typed, multirun, os.getcwd(), workers, code_digests(), _versions())
        return record.with_code(config.code())

    def with_code(self, paths: Sequence[str]) -> Record:
        """Return the same with the digests of the user's code that dotted paths name."""
        digests = source_digests(paths)
        return replace(self, user_code={os.path.relpath(file): digest for file, digest in digests.items()})

    def write(self, folder: Path) -> None:
        """The last thing that is written of a new sweep: with it there is something to resume."""
        if (folder / "trials.jsonl").exists():
            sync(folder / "trials.jsonl")
        with whole(folder / "sweep.json", durable=True) as making:
            making.touch(0o600)  # before anything is in it: an address that was typed may hold a password
            making.write_text(json.dumps(asdict(self), indent=1))
        remember_last(folder)


def remember_last(folder: Path) -> None:
    """What `resume=last` is, from here on."""
    with suppress(OSError):
        _LAST.parent.mkdir(exist_ok=True)
        write_text(_LAST, str(folder.absolute()))


def begin_folder(folder: Path, trials: Sequence[Trial]) -> None:
    """Take away what makes an earlier sweep in this folder one: its record first, then its trials' results."""
    (folder / "sweep.json").unlink(missing_ok=True)
    (folder / "trials.jsonl").unlink(missing_ok=True)
    name_storage(folder, anew=any(is_address(trial.config.cluster.storage_path) for trial in trials))
    for trial in trials:
        clear_left_over(make_storage(trial, folder))


def code_digests() -> dict[str, str]:
    """Of every file of the package that does something."""
    package = Path(fsdp_lab.__file__).resolve().parent
    files = sorted(package.rglob("*.py"))
    return {str(f.relative_to(package)): hashlib.sha256(f.read_bytes()).hexdigest()[:16] for f in files}


def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in _LIBRARIES}


def read_record(folder: Path, key: str = "resume") -> Record:
    """`sweep.json` of a folder.

    Args:
        key: what names the folder on the command line.

    Raises:
        UserError: there is none, or it is not one.
    """
    path = folder / "sweep.json"
    try:
        return _checked(Record(**json.loads(path.read_text(encoding="utf-8"))))
    except FileNotFoundError:
        raise UserError(
            f"{key}={folder}: no sweep was started there (there is no {path.name}); give the folder that holds "
            f"results.csv, the id of a sweep's parent run, or {key}=last."
        ) from None
    except PermissionError:
        raise UserError(
            f"{key}={folder}: {path} is for its owner alone: an address in it may hold a password; ask for a copy "
            "of the folder that you may read, or for the id of the sweep's run in a store that you share."
        ) from None
    except (ValueError, TypeError) as error:
        raise UserError(f"{key}={folder}: {path} cannot be read ({error}); start the sweep anew.") from None


def _checked(record: Record) -> Record:
    """
    Raises:
        TypeError: a value is of another type.
    """
    wrong = [
        name
        for name, types in (("id", str), ("launched_in", str), ("multirun", bool), ("num_workers", int),
                            ("code", dict), ("libraries", dict), ("num_trials", int | None))
        if not isinstance(getattr(record, name), types)
    ]  # fmt: skip
    if wrong or not _is_words(record.arguments):
        raise TypeError(f"it has no valid `{wrong[0] if wrong else 'arguments'}`")
    return record


def _is_words(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(word, str) for word in value)


def add_trial(folder: Path, trial: Trial) -> None:
    """Append a trial to `trials.jsonl`, before it starts."""
    content = {
        "number": trial.index,
        "overrides": words_to_write(trial.overrides),
        "folder": os.path.relpath(trial.folder, folder),
    }
    if trial.config.cluster.storage_path is not None:
        content["storage"] = trial_address(trial, folder) or str(storage(trial, folder))
    append_line(folder / "trials.jsonl", json.dumps(content))


def read_trials(folder: Path, num_trials: int | None = None, key: str = "resume") -> list[tuple[list[str], Path]]:
    """The overrides and the folder of each trial, in their order. A last line that a kill cut short is no trial: it is
    written before its trial starts.

    Args:
        num_trials: how many there are; None where that is not known.
        key: what the folder was given to on the command line.

    Raises:
        UserError: a trial is missing. Without it, the results of the others would be taken for those of its neighbours.
    """
    lines = {line.get("number", position): line for position, line in enumerate(_lines(folder))}
    count = max(num_trials or 0, 1 + max(lines, default=-1))
    known = {folder / line["folder"] for line in lines.values()}
    if num_trials is None and (unknown := sorted({path.parent for path in folder.glob("*/outcome.json")} - known)):
        raise UserError(
            f"{key}={folder}: {folder / 'trials.jsonl'} lacks the trial in {unknown[0]}: a line is damaged or gone. "
            "Restore the file from a copy; or, if that trial is of an earlier sweep, move its folder away."
        )
    if missing := list(islice((number for number in range(count) if number not in lines), _MOST_NAMED)):
        more = " …" if len(missing) == _MOST_NAMED else ""
        raise UserError(
            f"{key}={folder}: {folder / 'trials.jsonl'} lacks trial {', '.join(map(str, missing))}{more} of {count}: a "
            "line is damaged or gone. Restore the file from a copy, or start the sweep anew; what MLflow has of it: "
            "python -m fsdp_lab.report sweep=<id of the sweep's run>."
        )
    return [(lines[number]["overrides"], folder / lines[number]["folder"]) for number in range(count)]


def drop_checkpoints(folder: Path, stored: bool = True) -> None:
    """Take away the checkpoints and exported models of a sweep with which nobody goes on; what it measured stays.

    Reads nothing but `trials.jsonl`: the configs may be of other code.

    Args:
        stored: those in object storage, too.

    Raises:
        OSError: something cannot be taken away, or does not belong to the sweep; then nothing of it is touched.
    """
    for where in _places(folder):
        if is_address(str(where)):
            if stored:
                _drop_stored(Storage(str(where)), ["."])
            continue
        if (where / "checkpoints").exists():
            shutil.rmtree(where / "checkpoints")
        (where / "model.pt").unlink(missing_ok=True)
        shutil.rmtree(where / "model", ignore_errors=True)


def drop_stored_sweep(address: str) -> None:
    """As `drop_checkpoints`, of a sweep in object storage, by its `trials.jsonl` there.

    Raises:
        UserError: it has checkpoints, and nothing says of which trials.
        StorageRefused, StorageAway: see there.
    """
    storage, trials = Storage(address), ""
    with suppress(FileNotFoundError):  # a sweep that was refused has none
        trials = storage.read("trials.jsonl").decode(errors="replace")
    folders = [line["folder"] for line in _parsed(trials)]
    if not folders and any(_ANY_CHECKPOINT.search(name) for name in storage.files()):
        raise UserError(f"{address} has checkpoints, and its trials.jsonl names no trial; remove them by hand.")
    _drop_stored(storage, folders)


def _drop_stored(storage: Storage, folders: Sequence[str]) -> None:
    """
    Args:
        folders: of trials, seen from the storage; "." is all of it.
    """
    below = [re.escape(f"{folder}/") if folder != "." else "" for folder in folders]
    ours = re.compile(f"({'|'.join(below)})({_OF_CHECKPOINTS.pattern})")
    # the markers first: a kill leaves data that nothing names, and no checkpoint without its data
    names = sorted(name for name in storage.files() if folders and ours.fullmatch(name))
    storage.delete(sorted(names, key=lambda name: not name.endswith(".json")))


def _places(folder: Path) -> list[Any]:
    """The folders of a sweep's trials, and their addresses in object storage. Raises as `drop_checkpoints`."""
    addresses = [line["storage"] for line in _lines(folder) if is_address(line.get("storage"))]
    folders = [
        (
            folder / line["folder"]
            if is_address(line.get("storage"))
            else Path(line.get("storage") or folder / line["folder"])
        ).resolve()
        for line in _lines(folder)
    ]
    for where in (*folders, *addresses):
        if not is_storage_of(Path(where), folder):
            raise OSError(f"{folder}/trials.jsonl names {where}, which is not below the sweep's folder or its storage")
    return [*folders, *addresses]


def _lines(folder: Path) -> Iterator[dict[str, Any]]:
    path = folder / "trials.jsonl"
    return _parsed(path.read_text(errors="replace") if path.exists() else "")


def _parsed(trials: str) -> Iterator[dict[str, Any]]:
    for line in trials.splitlines():
        with suppress(json.JSONDecodeError):
            if _is_trial(content := json.loads(line)):
                yield content


def _is_trial(content: Any) -> bool:
    if not isinstance(content, dict) or not _is_words(content.get("overrides")):
        return False
    kinds = {"folder": str, "number": int, "storage": str}
    return "folder" in content and all(isinstance(content.get(key, kind()), kind) for key, kind in kinds.items())


def find_folder(named: str, tracking: TrackingConfig, key: str = "resume") -> Path:
    """The folder that `resume=...` stands for: a folder, an address in storage, the id of a parent run, or `last`.

    Args:
        key: what it was given to on the command line.

    Raises:
        UserError: it stands for none.
    """
    if not named:
        raise UserError(f"{key}= names nothing; give the sweep's folder, the id of its parent run, or {key}=last.")
    if named == "last":
        if not _LAST.exists():
            raise UserError(
                f"{key}=last: no sweep was started from this folder (there is no {_LAST}); give the sweep's own "
                "folder or the id of its parent run."
            )
        last = _LAST.read_text(errors="replace").strip()
        if not Path(last).is_absolute() or not Path(last).is_dir():
            raise UserError(
                f"{key}=last: {_LAST} names no folder ({last or 'it is empty'}); give the sweep's own folder or the id "
                "of its parent run."
            )
        return Path(last)
    if is_address(named):
        return fetch_sweep(named, key)
    folder = Path(named)
    if folder.is_dir():
        return folder.absolute()
    if not re.fullmatch(r"[0-9a-f]{32}", named):
        raise UserError(
            f"{key}={named} is no folder and no id of a run (32 digits of 0-9a-f); give the sweep's folder, the id "
            f"of its parent run, or {key}=last."
        )
    from fsdp_lab.tracking import folder_of_run

    return folder_of_run(tracking, named)


def changes_of_code(record: Record) -> list[str]:
    """What is other now, in words."""
    code = code_digests()
    files = sorted(name for name in record.code.keys() | code.keys() if record.code.get(name) != code.get(name))
    now = _versions()
    libraries = [
        f"{name} {there} there, {now[name]} here"
        for name, there in record.libraries.items()
        if now.get(name, there) != there  # other versions may look at more
    ]
    own = [file for file, digest in record.user_code.items() if file_digest(Path(file)) != digest]
    return [
        *([f"fsdp_lab's code: {_first(files)}"] if files else []),
        *([f"your code changed: {_first(own)}"] if own else []),
        *libraries,
    ]


def _first(files: Sequence[str]) -> str:
    return ", ".join(files[:5]) + (f" and {len(files) - 5} more" if len(files) > 5 else "")


def changes_of_workers(record: Record, config: SweepConfig) -> list[str]:
    """Whether `cluster.num_workers=null` stands for another number now."""
    workers = workers_of(config)
    if config.cluster.num_workers is not None or workers == record.num_workers:
        return []
    return [f"cluster.num_workers=null was {record.num_workers} there and is {workers} here"]


def changes_of_config(trial_folder: Path, config: SweepConfig, typed: Sequence[str] = ()) -> list[str]:
    """What the trial's saved config has other than `config`, in words. Nothing for a trial that was never set up.

    Args:
        typed: for the resume. Where the saved config is lost, `config` is what it was but for these.
    """
    path = trial_folder / ".hydra" / "config.yaml"
    values = read_hydra_file(trial_folder, path.name)
    if values is None:
        unknown = {*_settings(config), *groups()} if path.parent.is_dir() else set()
        return [
            f"{path}, which had the value of {key_of(w)}, is damaged or gone" for w in typed if key_of(w) in unknown
        ]
    try:
        before = resolved(saved_config(values))
    except ConfigError as error:
        return [f"{path}: {error}"]
    there, here, keys = _settings(before), _settings(config), keys_of(SweepConfig)
    return [
        f"{key}={there.get(key)} there, {here.get(key)} here"
        for key in dict.fromkeys([*here, *there])
        if there.get(key) != (value := here.get(key))
        and not (value is None and key in keys and there.get(key) == keys[key].before_null)
    ]


# Each of Hydra's files has this key near its end, whatever version wrote it: a file that was cut short lacks it.
_LAST_KEYS = {"config.yaml": "report", "hydra.yaml": "verbose"}


def read_hydra_file(trial_folder: Path, name: str) -> dict[str, Any] | None:
    """Return what `.hydra/config.yaml`, or `hydra.yaml` below its only key, holds; None where there is no such file,
    or, with a warning, where it is damaged."""
    path = trial_folder / ".hydra" / name
    try:
        text = path.read_text(encoding="utf-8")
        content = yaml.load(text, Loader=yaml.CSafeLoader)
    except FileNotFoundError:
        return None
    except (ValueError, yaml.YAMLError) as error:
        report_damaged(path, " ".join(str(error).split()))
        return None
    if name == "hydra.yaml" and isinstance(content, dict):
        content = content.get("hydra")
    if not isinstance(content, dict) or _LAST_KEYS[name] not in content or not text.endswith("\n"):
        report_damaged(path, "it is cut short")
        return None
    return content


def saved_config(values: dict[str, Any]) -> SweepConfig:
    """Read a trial's `.hydra/config.yaml`, in which Hydra, and earlier versions, leave the keys of the nights too.

    Raises:
        ConfigError: a key or a value that is none any more.
    """
    return part(from_dict(NightlyConfig, values), SweepConfig)


def _settings(config: SweepConfig) -> dict[str, Any]:
    """What a resume must not change. A password may be another, and is not told."""
    keys = keys_of(config)
    counting = settings(config, Between.STARTS)
    return {key: redact(str(value)) if keys[key].secret else value for key, value in counting.items()}


def with_overrides(overrides: Sequence[str], on_top: Sequence[str]) -> list[str]:
    """Overrides with others in the place of those for the same keys."""
    keys = {key_of(override) for override in on_top}
    return [*(override for override in overrides if key_of(override) not in keys), *on_top]


def write_hydra_folder(trial: Trial) -> None:
    """`.hydra/` of a trial, as Hydra's own launcher leaves it, but for passwords."""
    hydra_folder = trial.folder / ".hydra"
    trial.folder.mkdir(0o700, parents=True, exist_ok=True)
    hydra_folder.mkdir(exist_ok=True)
    hydra = OmegaConf.to_container(trial.hydra_config.hydra, resolve=False, enum_to_str=True)
    contents = {
        "config": config_to_write(trial),
        "hydra": {"hydra": redact_strings(hydra)},  # what was typed is in it more than once
        "overrides": words_to_write(trial.overrides),
    }
    for name, content in contents.items():  # by libyaml, which is many times as fast as Hydra's way
        text = yaml.dump(content, Dumper=yaml.CSafeDumper, sort_keys=False, allow_unicode=True)
        write_text(hydra_folder / f"{name}.yaml", text)


def restore_hydra_folder(trial: Trial) -> None:
    """Write `.hydra/` again, as the trial is composed now, where a file of it is damaged or gone."""
    if not all(read_hydra_file(trial.folder, name) for name in _LAST_KEYS):
        with suppress(OSError):  # the folder cannot be written: what needs it says so
            write_hydra_folder(trial)
