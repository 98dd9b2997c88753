"""`key=value` words of the commands that are no Hydra applications."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_lab.config.errors import ConfigError


def read_words(arguments: Sequence[str], keys: Sequence[str], usage: str) -> dict[str, str]:
    """The words as a dictionary; with `--help`, or none, the usage is printed instead.

    Raises:
        ConfigError: a key that is none of `keys`.
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
