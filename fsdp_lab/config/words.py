"""`key=value` words of the commands that are no Hydra applications."""

from __future__ import annotations

import re
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
_ONE_REPEAT = re.compile(r"\+{0,2}repeat=(\d+)")
_WRITTEN = {2: "two", 3: "three", 4: "four", 5: "five", 6: "six"}


def check_repeat(words: Sequence[str]) -> None:
    """
    Args:
        words: of a sweep that starts now. A resume may have any.

    Raises:
        ConfigError: one `repeat=3`, which reads as a count and is the number of a run. `repeat=0` is the first run.
    """
    numbers = (int(found[1]) for word in words if (found := _ONE_REPEAT.fullmatch(word)))
    for number in filter(None, numbers):
        runs = max(2, number)
        several = ",".join(map(str, range(runs))) if runs in _WRITTEN else f"'range({runs})'"
        raise ConfigError(
            f"repeat={number} is the number of one run, not how many there are; {_WRITTEN.get(runs, runs)} runs of "
            f"each setting are repeat={several}, and {AUTO_REPEAT} runs what it takes."
        )


def for_hydra(words: Sequence[str]) -> list[str]:
    """A sweep's command line as Hydra takes it."""
    return [_FOR_HYDRA if word == AUTO_REPEAT else word for word in words]


def as_typed(words: Sequence[str]) -> list[str]:
    """The command line that `for_hydra` was given."""
    return [AUTO_REPEAT if word == _FOR_HYDRA else word for word in words]
