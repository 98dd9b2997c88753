"""`key=value` arguments of the commands that are no Hydra applications."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fsdp_lab.config.errors import ConfigError
from fsdp_lab.redact import has_password, names_password


def key_of(word: str) -> str:
    """Return the key of an override, without the sign before it."""
    return word.partition("=")[0].lstrip("+~")


def read_words(arguments: Sequence[str], keys: Sequence[str], usage: str) -> dict[str, str]:
    """Return the `key=value` arguments as a dictionary; with `--help`, or without arguments, print the usage instead.

    Raises:
        ConfigError: an unknown key.
        SystemExit: the usage was printed.
    """
    if not arguments or {"-h", "--help"} & set(arguments):
        print(usage)
        raise SystemExit(0 if arguments else 2)
    options = dict(argument.partition("=")[::2] for argument in arguments)
    for key in options:
        if key not in keys:
            raise ConfigError(f"{key} is not a key. The keys are: {', '.join(keys)}.")
    return options


_OF_STORAGE = ("resume", "cluster.storage_path")  # their addresses hold no credentials, by a rule of their own


def check_passwords(words: Sequence[str]) -> None:
    """Check that no argument holds a password: a sweep's folder keeps the command line, and others may see it.

    Raises:
        ConfigError: with the key, not the value.
    """
    for word in words:
        key = key_of(word)
        is_held = has_password(word) if key.startswith("tracking.") else names_password(word)
        if key not in _OF_STORAGE and is_held:
            by_mlflow = " MLflow also reads MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD."
            raise ConfigError(
                f"{key}=... holds a password, which the sweep's folder would keep; export the value as a variable, and "
                f"write '{key}=${{oc.env:NAME}}'.{by_mlflow if key == 'tracking.uri' else ''}"
            )


def quoted(value: object) -> str:
    """Return a value as text in a Hydra override: quoted, except for a plain path."""
    if _PLAIN_PATH.fullmatch(str(value)):
        return str(value)
    text = str(value).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{text}'"


_PLAIN_PATH = re.compile(r"[\w.-]*(/[\w.-]+)+")

_ONE_REPEAT = re.compile(r"\+{0,2}repeat=(\d+)")


def check_repeat(words: Sequence[str]) -> None:
    """Check that `repeat` of a new sweep is not a count.

    Args:
        words: the command line of a sweep that starts now. A resume may have any.

    Raises:
        ConfigError: `repeat=3`, for example, which names one run. `repeat=0` is the first run.
    """
    numbers = (int(match[1]) for word in words if (match := _ONE_REPEAT.fullmatch(word)))
    for number in filter(None, numbers):
        raise ConfigError(
            f"repeat={number} names one run, not a number of runs; for {max(2, number)} runs of each setting use "
            f"repeats={max(2, number)}."
        )
