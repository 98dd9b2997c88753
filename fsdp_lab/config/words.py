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


# `repeat` is a whole number; so that Hydra takes the word, it gets it as a sweep of the first round.
AUTO_REPEAT = "repeat=auto"
_FOR_HYDRA = "repeat=tag(auto,choice(0))"


def for_hydra(words: Sequence[str]) -> list[str]:
    """A sweep's command line as Hydra takes it."""
    return [_FOR_HYDRA if word == AUTO_REPEAT else word for word in words]


def as_typed(words: Sequence[str]) -> list[str]:
    """The command line that `for_hydra` was given."""
    return [AUTO_REPEAT if word == _FOR_HYDRA else word for word in words]
