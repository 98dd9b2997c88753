"""The metadata of a configuration field: its allowed values, and how it is typed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from fsdp_lab.config.errors import ConfigError
from fsdp_lab.config.serialize import flatten

LARGEST_INTEGER = 2**53  # JSON and every database store it exactly


# Returns what is wrong with a value, as text to follow `key=value`; None for a valid value. The reference shows its
# docstring, `Take ...`, as the key's values.
Rule = Callable[[Any], str | None]


@dataclass(frozen=True)
class Key:
    """The metadata of a key. Where it counts in comparisons is in `compare.py`.

    Attributes:
        rule: checks a value; null is always valid if the type allows it.
        named_by_option: the name of a group's option implies the value, as `sharding=ddp` implies
            `sharding.granularity`.
        named: the name that users type, if it is not the field's.
        example: a value that a message may suggest if the default is null.
    """

    rule: Rule | None = None
    named_by_option: bool = False
    named: str | None = None
    example: Any = None


def key(default: Any, rule: Rule | None = None, **metadata: Any) -> Any:
    """Return a field with the metadata of `Key`.

    Args:
        default: the value, or a function that makes it.
        **metadata: the other attributes of `Key`.
    """
    known = {"key": Key(rule, **metadata)}
    if callable(default):
        return field(default_factory=default, metadata=known)
    return field(default=default, metadata=known)


@cache
def keys_of(config_class: Any) -> dict[str, Key]:
    """Return the metadata of every key of a dataclass by its dotted name, in the order of the fields."""
    keys: dict[str, Key] = {}
    for each in dataclasses.fields(config_class):
        made: Any = each.default_factory
        if hasattr(made, "__dataclass_fields__"):
            keys |= {f"{each.name}.{name}": inner for name, inner in keys_of(made).items()}
            continue
        known: Key = each.metadata["key"]
        # a group that takes any key has those of its default
        names = made() if each.name == "arguments" else [known.named or each.name]
        keys |= dict.fromkeys(names, known)
    return keys


def check_ranges(config: Any, prefix: str = "") -> None:
    """Apply the rule of each key.

    Args:
        prefix: the dotted path of `config` on the command line, such as `report.`.

    Raises:
        ConfigError: a value breaks its key's rule, or an integer is too large for some store.
    """
    config_class: Any = type(config)
    keys = keys_of(config_class)
    for name, value in flatten(config).items():
        check_range(f"{prefix}{name}", value, keys.get(name))


def check_range(name: str, value: Any, known: Key | None) -> None:
    """Apply the rule of one key, if it is known, and that for every integer. Raises as `check_ranges`."""
    if type(value) is int and abs(value) > LARGEST_INTEGER:
        raise ConfigError(f"{name}={value} is too large; use at most {LARGEST_INTEGER}.")
    if known is not None and known.rule is not None and value is not None and (wrong := known.rule(value)):
        raise ConfigError(f"{name}={value} {wrong}.")


def at_least_one(value: float) -> str | None:
    """Take 1 or more."""
    return None if value >= 1 else "is below 1; use a whole number of 1 or more"


def not_negative(value: float) -> str | None:
    """Take 0 or more."""
    return None if value >= 0 else "is negative; use 0 or more"


def positive(value: float) -> str | None:
    """Take a number above 0."""
    if not value > 0:
        return "is not above 0; use a positive number"
    return None if math.isfinite(value) else "is not finite; use a number"


def below_one(value: float) -> str | None:
    """Take 0 or more, below 1."""
    return None if 0 <= value < 1 else "is outside [0, 1); use 0 or more, below 1"


def divisors(number: int) -> str:
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)
