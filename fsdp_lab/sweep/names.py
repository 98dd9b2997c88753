"""What trials, folders and commands are called before people."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdp_lab.compose import Trial
from fsdp_lab.config.words import as_typed
from fsdp_lab.redact import redact
from fsdp_lab.sweep.state import TrialState
from fsdp_lab.sweep.store.paths import copy_of
from fsdp_lab.sweep.store.record import TYPED_ELSEWHERE

GOES_ON = "FSDP_LAB_GOES_ON"  # set by a night for its sweep


def setting(trial: Trial, key: str) -> Any:
    """What a trial has for a swept key: a group's option, or a value."""
    return trial.choices.get(key, trial.values.get(key))


def run_name(trial: Trial, swept: Sequence[str]) -> str:
    """Short, for lists: the swept settings, or the main ones for a trial alone."""
    keys = swept or ("sharding", "precision", "offload", "reshard_after_forward")
    return " ".join(f"{key}={setting(trial, key)}" for key in keys)


def short_name(trial: Trial, swept: Sequence[str]) -> str:
    """For MLflow's list, which shows a dozen letters: `per_block never`, `root lr=0.00123`. Numbers are rounded."""
    keys = swept or ("sharding", "precision", "offload", "reshard_after_forward")
    words = (
        str(setting(trial, k)) if k in trial.choices else f"{k.split('.')[-1]}={_rounded(setting(trial, k))}"
        for k in keys
    )
    return " ".join(words)


def _rounded(value: Any) -> str:
    """To three digits, of a whole number all."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def sweep_name(trials: Sequence[Trial], swept: Sequence[str]) -> str:
    """Return what a sweep compares: `zero2_zero3: sharding × reshard_after_forward (4 trials)`. A search has its name
    before the number of trials that there are by now."""
    axes = " × ".join(key.lstrip("+").rpartition(".")[2] for key in swept)
    preset = trials[0].choices.get("experiment", "null") if trials else "null"
    study = f"{preset}: " if preset != "null" else ""
    search = trials[0].config.search if trials else None
    how = f"{search.name}, " if search is not None and search.samples else ""
    return f"{study}{axes or 'one setting'} ({how}{len(trials)} trial{'' if len(trials) == 1 else 's'})"


def label(number: int, states: Sequence[TrialState]) -> str:
    return "trial" if states[number].trial.index is None else f"trial {number}"


def command_line() -> str:
    """As it was typed, for the record."""
    return "python -m fsdp_lab " + " ".join(shlex.quote(argument) for argument in as_typed(sys.argv[1:]))


def go_on_command(folder: Path) -> str:
    """What goes on with an interrupted sweep: for one that belongs to a night, what its night says."""
    return os.environ.get(GOES_ON) or resume_command(folder)


def folder_key(multirun: bool) -> str:
    """What sets a sweep's folder on the command line; a night gives its sweep one, below its own."""
    if GOES_ON in os.environ:
        return "nightly.folder"
    return "hydra.sweep.dir" if multirun else "hydra.run.dir"


def resume_command(folder: Path) -> str:
    """Return it with the folder of the user's options, which no resume takes from a file."""
    folders, trust = config_dir_words(sys.argv[1:]), ["trust=true"] if copy_of(folder) else []
    return shlex.join(["python", "-m", "fsdp_lab", f"resume={relative(folder)}", *trust, *folders])


def ui_command(uri: str) -> str:
    """Return the address of a tracking server, or the command that starts MLflow's UI on a store without one."""
    scheme, is_path, rest = uri.partition(":///")
    if is_path and scheme.startswith("sqlite"):
        path, mark, query = rest.partition("?")
        uri = f"{scheme}:///{relative(Path(path))}{mark}{query}"
    is_server = uri.startswith(("http://", "https://"))
    return redact(uri if is_server else shlex.join(["python", "-m", "mlflow", "ui", "--backend-store-uri", uri]))


def config_dir_words(words: Sequence[str]) -> list[str]:
    """Return the word of a command line that names the folder of the user's options."""
    return [word for word in words if word.startswith("--config-dir=")]


def relative(path: Path) -> Path:
    """As seen from where the command was typed, where it lies below: a resume may have gone to another folder."""
    path, here = path.absolute(), Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) and TYPED_ELSEWHERE not in os.environ else path
