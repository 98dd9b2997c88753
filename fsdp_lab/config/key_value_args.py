"""`key=value` arguments of the commands that are no Hydra applications."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from fsdp_lab.config.address import check_credentials
from fsdp_lab.config.errors import ConfigError
from fsdp_lab.config.options import option_values
from fsdp_lab.config.sweep import TrackingConfig

_UNUSED = {
    "MLFLOW_EXPERIMENT_ID": "tracking.experiment, or MLFLOW_EXPERIMENT_NAME, names the experiment",
    "MLFLOW_RUN_ID": "each trial gets a run of its own",
}
MLFLOW_VARIABLES = {"tracking.uri": "MLFLOW_TRACKING_URI", "tracking.experiment": "MLFLOW_EXPERIMENT_NAME"}


def key_of(word: str) -> str:
    """Return the key of an override, without the sign before it."""
    return word.partition("=")[0].lstrip("+~")


def with_overrides(overrides: Sequence[str], on_top: Sequence[str]) -> list[str]:
    """Return overrides, with those in `on_top` replacing the ones for the same keys."""
    keys = {key_of(override) for override in on_top}
    return [*(override for override in overrides if key_of(override) not in keys), *on_top]


def read_words(arguments: Sequence[str], keys: Sequence[str], usage: str) -> dict[str, str]:
    """Return the `key=value` arguments as a dictionary; with `--help`, or without arguments, print the usage instead.

    Raises:
        ConfigError: an unknown key, or credentials in an address.
        SystemExit: the usage was printed.
    """
    if not arguments or {"-h", "--help"} & set(arguments):
        print(usage)
        raise SystemExit(0 if arguments else 2)
    check_words(arguments)
    options = dict(argument.partition("=")[::2] for argument in arguments)
    for key in options:
        if key not in keys:
            raise ConfigError(f"{key} is not a key. The keys are: {', '.join(keys)}.")
    return options


def check_words(words: Sequence[str]) -> None:
    """Check that no argument has credentials in it. Raises as `check_credentials`."""
    for word in words:
        key = key_of(word)
        check_credentials("an argument" if "://" in key else key, word)


def with_environment(words: Sequence[str], config_dir: str | None = None) -> list[str]:
    """Return a command line with the store and the experiment that MLflow's variables name, unless it names them.

    They become words of it, so that the sweep's record has them: a resume from another shell uses the same store.
    What its preset sets stays.

    Args:
        config_dir: the folder of the user's options; None: there is none.

    Raises:
        ConfigError: a variable has credentials in it.
    """
    if any(word.lstrip("+").startswith("resume=") for word in words):
        return list(words)
    preset = next((word.partition("=")[2] for word in words if word.startswith("experiment=")), "null")
    content = option_values("experiment", preset, config_dir)
    of_preset = content.get("tracking") or {} if isinstance(content, dict) else {}  # else refused when it is composed
    typed = {*map(key_of, words), *(f"tracking.{key}" for key in of_preset)}
    missing = {key: name for key, name in MLFLOW_VARIABLES.items() if os.environ.get(name) and key not in typed}
    for name in missing.values():
        check_credentials(name, os.environ[name])
    return [*(f"{key}={quoted(os.environ[name])}" for key, name in missing.items()), *words]


def unused_variables() -> list[str]:
    """Return a note on each variable of MLflow's in the environment that sweeps do not use."""
    return [f"{name} is not used: {why}" for name, why in _UNUSED.items() if os.environ.get(name)]


def store_named(options: Mapping[str, str]) -> str:
    """Return the MLflow store that a command without Hydra uses: the typed one, MLflow's variable, or the default."""
    return options.get("tracking.uri") or os.environ.get("MLFLOW_TRACKING_URI") or TrackingConfig.uri


def quoted(value: object) -> str:
    """Return a value as text in a Hydra override: quoted, except for a plain path."""
    if _PLAIN_PATH.fullmatch(str(value)):
        return str(value)
    text = re.sub(r"(\\*)\$\{", r"\1\1\\${", str(value))  # else OmegaConf looks for what is in the braces
    text = re.sub(r"(\\*)('|$)", r"\1\1\2", text).replace("'", "\\'")  # only before a quote is a backslash an escape
    return f"'{text}'"


# Hydra would read 1e3, true or null as no text.
_PLAIN_PATH = re.compile(
    r"(?!(?:null|true|false|nan|inf)$)[a-z_][\w.-]*(/[\w.-]+)*|[\w.-]*(/[\w.-]+)+", re.ASCII | re.IGNORECASE
)
