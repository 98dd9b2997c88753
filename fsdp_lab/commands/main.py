"""The command line: one trial, or with -m a sweep. `python -m fsdp_lab --help` is the table of contents."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.utils import run_job

from fsdp_lab.commands.messages import explain
from fsdp_lab.commands.reference import keys_text, versions
from fsdp_lab.config import ConfigError, all_keys, conf_dir, split_config_dir, with_custom
from fsdp_lab.config.compose import register_schema, single_trial
from fsdp_lab.config.launcher import leave_launcher
from fsdp_lab.config.machine import ask_clusters
from fsdp_lab.config.options import groups
from fsdp_lab.config.overrides import read_overrides, search_path
from fsdp_lab.config.status import ExitCode
from fsdp_lab.config.target import import_from
from fsdp_lab.config.words import key_of, names_code, with_environment
from fsdp_lab.engine.cluster import running_cluster, stop_ray
from fsdp_lab.machine.output import outlast_reader
from fsdp_lab.storage.locks import unwritable

_SHOWS = ("--cfg", "-c", "--info", "-i")  # Hydra's options that print instead of running


def main() -> None:
    """Run, and exit with 0 (every trial has a result), 1 (one failed), 2 (bad input), 70 (a bug) or 130 (Ctrl-C)."""
    outlast_reader()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises errors, and we print one message
    try:
        if (answer := information(sys.argv[1:])) is not None:
            print(answer)
            return
        leave_launcher()
        config_dir, words = split_config_dir(sys.argv[1:])
        if {"-h", "--help"} & set(words):
            words = ["--help"]  # with other words Hydra would first compose a trial
        search_path(config_dir)  # checks the folder and its files
        options, overrides = _split(words)
        check_options(options)
        overrides = read_overrides(overrides, config_dir)
        if nightly := [key for key in map(key_of, overrides) if key.partition(".")[0] == "nightly"]:
            raise ConfigError(
                f"{nightly[0]} is a key of python -m fsdp_lab.nightly; leave it out here, or use it there."
            )
        folder = [f"--config-dir={config_dir}"] if config_dir is not None else []  # a resume compares it
        _, words = split_config_dir(with_custom(resume_first([*folder, *options, *overrides])))
        sys.argv[1:] = options_first(with_environment(words, config_dir), config_dir)
        if config_dir is not None or names_code(words):
            import_from(os.getcwd())
    except Exception as error:  # noqa: BLE001 - `leave` prints it
        leave(error)
    register_schema()
    ask_clusters(running_cluster)
    app = hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")(run_single)
    try:
        app()
    except KeyboardInterrupt:
        end_interrupted()
    except SystemExit as end:
        if end.code == ExitCode.interrupted:
            end_interrupted()
        raise
    except Exception as error:  # noqa: BLE001 - `leave` prints it
        leave(_of_folder(error))


def _of_folder(error: Exception) -> Exception:
    """Return the message for an error of Hydra's while it creates a trial's folder; other errors unchanged."""
    raised_in = {frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)}
    if isinstance(error, OSError) and error.filename and run_job.__name__ in raised_in:
        return unwritable("hydra.run.dir", Path(error.filename), error)
    return error


def information(arguments: Sequence[str]) -> str | None:
    """Return what `--version` or `--keys [part of a name ...]` prints; None without either.

    `doctor` exits with its own status.

    Raises:
        ConfigError: no key contains the part.
    """
    if arguments[:1] == ["doctor"]:
        from fsdp_lab.commands.doctor import main as examine

        sys.exit(examine(arguments[1:]))
    if "--version" in arguments:
        return versions()
    if "--keys" in arguments:
        return keys_text([word for word in arguments if not word.startswith("-")], shutil.get_terminal_size().columns)
    return None


def end_interrupted() -> NoReturn:
    """Run the registered exit functions, then exit with 130.

    Ray's native threads, if interrupted during their start, would crash the interpreter at its shutdown.
    """
    atexit._run_exitfuncs()  # noqa: SLF001 (Python has no public name for it)
    stop_ray()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ExitCode.interrupted)


def run_single(cfg: Any) -> None:
    """Run one trial: Hydra's function without -m."""
    from fsdp_lab.sweep.command import Alone
    from fsdp_lab.sweep.start import run

    try:
        code = run(Alone(single_trial(cfg)))
    except Exception as error:  # noqa: BLE001 - `leave` prints it
        leave(error)  # here, because Hydra would first print its own line
    if code:
        sys.exit(code)


def leave(error: Exception) -> NoReturn:
    """Print an error that the user can fix and exit with 2; of a bug print the traceback, and exit with 70."""
    message = explain(error)
    if message is None:
        traceback.print_exception(error)
        sys.exit(ExitCode.crashed)
    print(f"fsdp_lab: {message}", file=sys.stderr)
    sys.exit(ExitCode.refused)


def resume_first(arguments: list[str]) -> list[str]:
    """Return the command line of the sweep that `resume=...` names; without it, the same words."""
    if not any(a.startswith("resume=") and a != "resume=null" for a in arguments):
        return arguments
    from fsdp_lab.sweep.store.resume import resume_arguments

    return resume_arguments(arguments)


def check_options(options: Sequence[str]) -> None:
    """Check that this command has these options, written in full.

    Raises:
        ConfigError: an option is unknown, or names another configuration than ours.
    """
    for name in (option.partition("=")[0] for option in options if option.startswith("-")):
        if name in _CONFIG:
            raise ConfigError(
                f"{name} cannot be used: the configuration is fsdp_lab's. Put your own options into a folder that "
                "--config-dir names, and what you type every time into a preset there, experiment/<name>.yaml."
            )
        if name not in _OPTIONS:
            key = name.lstrip("-")
            meant = f"write {key}=<value>" if key in (*all_keys(), *groups()) else f"use one of {', '.join(_OPTIONS)}"
            raise ConfigError(f"{name} is not an option; {meant}.")


_CONFIG = ("--config-path", "-cp", "--config-name", "-cn")
_OPTIONS = ("-m", "--multirun", "-r", "--run", "--config-dir", "-cd", *_SHOWS, "--resolve", "-p", "--package", "-sc",
    "--shell-completion", "--hydra-help", "--experimental-rerun", "--version", "--keys", "-h", "--help")  # fmt: skip
# Hydra's options whose value is the next word.
_WITH_VALUE = ("--cfg", "-c", "--info", "-i", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn")


def options_first(arguments: list[str], config_dir: str | None) -> list[str]:
    """Return the arguments with options first, `-m` and `--config-dir` before all others.

    argparse needs the overrides together, but people type options anywhere. With an option that shows the config, `-m`
    is dropped: Hydra rejects both at once.
    """
    shows = any(a.partition("=")[0] in _SHOWS for a in arguments)
    flags = [] if shows else [a for a in arguments if a in ("-m", "--multirun")]
    folder = [f"--config-dir={config_dir}"] if config_dir is not None else []
    options, words = _split([a for a in arguments if a not in ("-m", "--multirun")])
    return [*flags[:1], *folder, *options, *words]


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return Hydra's options, and the overrides."""
    rest = list(arguments)
    follows = [before in _WITH_VALUE and "=" not in a for before, a in zip(["", *rest], rest, strict=False)]
    options = [a for a, is_value in zip(rest, follows, strict=True) if is_value or a.startswith("-")]
    return options, [a for a, is_value in zip(rest, follows, strict=True) if not (is_value or a.startswith("-"))]
