"""Names of trials, folders and commands for people."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdp_lab.config.compose import Trial
from fsdp_lab.config.options import OPEN_GROUPS
from fsdp_lab.config.serialize import value_text
from fsdp_lab.config.words import key_of, quoted
from fsdp_lab.sweep.grid import unescaped

_MAIN = ("sharding", "precision", "offload", "reshard_after_forward")
OF_A_NIGHT = "FSDP_LAB_OF_A_NIGHT"  # set by a night for its sweep


def setting(trial: Trial, key: str) -> Any:
    """Return a trial's value for a swept key: a group's option, a value, or the text that was typed.

    Arguments of the user's are text: of those, `1`, `'1'`, `[1]` and `{a:1}` are values of their own.
    """
    if key in trial.choices:
        return trial.choices[key]
    value = trial.values.get(key)
    is_ours = key in trial.values and key.partition(".")[0] not in OPEN_GROUPS
    if is_ours or isinstance(value, bool) or (isinstance(value, float) and trial.config.search.samples):
        return value
    typed = next((unescaped(word).partition("=")[2] for word in trial.overrides if key_of(word) == key), None)
    return value if typed is None else typed


def setting_text(trial: Trial, key: str) -> str:
    """Return a trial's value for a swept key as it is typed; one that a search drew has six digits here."""
    value = setting(trial, key)
    if isinstance(value, float) and abs(value) < 1e6:
        short = f"{value:.6g}"
        if trial.config.search.samples or float(short) == value:
            return short
    return value_text(value)


def run_name(trial: Trial, swept: Sequence[str]) -> str:
    """Return a short name for lists: the swept settings, or the main ones for a trial alone."""
    keys = swept or _MAIN
    return " ".join(f"{key}={setting_text(trial, key)}" for key in keys)


def short_name(trial: Trial, swept: Sequence[str]) -> str:
    """Return a name for MLflow's list, which shows a dozen letters: `per_block never`, `root lr=0.00123`.

    Numbers are rounded.
    """
    keys = swept or _MAIN
    words = (
        setting_text(trial, k) if k in trial.choices else f"{k.split('.')[-1]}={_rounded(setting(trial, k))}"
        for k in keys
    )
    return " ".join(words)


def _rounded(value: Any) -> str:
    """Return a number with three digits, a whole number with all."""
    if not isinstance(value, float):
        return value_text(value)
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def sweep_name(trials: Sequence[Trial], swept: Sequence[str]) -> str:
    """Return what a sweep compares, such as `zero2_zero3: sharding × reshard_after_forward (4 trials)`.

    A search's name comes before the current number of its trials.
    """
    axes = " × ".join(key.lstrip("+").rpartition(".")[2] for key in swept)
    study = f"{preset}: " if trials and (preset := preset_of(trials[0])) else ""
    search = trials[0].config.search if trials else None
    how = f"{search.name}, " if search is not None and search.samples else ""
    return f"{study}{axes or 'one setting'} ({how}{len(trials)} trial{'' if len(trials) == 1 else 's'})"


def preset_of(trial: Trial) -> str:
    """Return the preset of a trial; "" without one."""
    preset = trial.choices.get("experiment", "null")
    return "" if preset == "null" else preset


def label(trial: Trial) -> str:
    """Return `trial 3`, or `trial` for a trial alone."""
    return "trial" if trial.index is None else f"trial {trial.index}"


def command_line() -> str:
    return "python -m fsdp_lab " + " ".join(shlex.quote(argument) for argument in sys.argv[1:])


def resume_lines(folder: Path) -> list[str]:
    """Return the line with the command that resumes an interrupted sweep.

    The sweep of a night has none: another night starts.
    """
    if OF_A_NIGHT in os.environ:
        return []
    return [f"to resume: {resume_command(folder)}"]


def folder_key(multirun: bool) -> str:
    """Return the key that sets a sweep's folder on the command line; a night sets one below its own folder."""
    if OF_A_NIGHT in os.environ:
        return "nightly.folder"
    return "hydra.sweep.dir" if multirun else "hydra.run.dir"


def resume_command(folder: Path) -> str:
    """Return the command that resumes this process's sweep, with what a resume does not read from the folder."""
    return shlex.join(
        ["python", "-m", "fsdp_lab", f"resume={quoted(relative(folder))}", *config_dir_words(sys.argv[1:])]
    )


def report_command(folder: Path) -> str:
    return shlex.join(["python", "-m", "fsdp_lab.report", f"sweep={relative(folder)}"])


def ui_command(uri: str) -> str:
    """Return the address of a tracking server, or the command that starts MLflow's UI on a store without one."""
    is_server = uri.startswith(("http://", "https://"))
    return uri if is_server else shlex.join(["python", "-m", "mlflow", "ui", "--backend-store-uri", uri])


def config_dir_words(words: Sequence[str]) -> list[str]:
    """Return the word of a command line that names the folder of the user's options."""
    return [word for word in words if word.startswith("--config-dir=")]


def relative(path: Path) -> Path:
    """Return a path relative to where the command was typed, if it is below."""
    path, here = path.absolute(), Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
