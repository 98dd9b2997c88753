"""The metadata of a configuration field: its allowed values, and where the key counts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, Flag, auto
from functools import cache
from typing import Any

from fsdp_lab.config.convert import flatten
from fsdp_lab.config.errors import ConfigError

LARGEST_INTEGER = 2**53  # what JSON and every database keep exactly


class Between(Flag):
    """Pairs of configs that are compared. A key counts in every comparison, except those in its `may_differ`."""

    CELLS = auto()  # two cells of a grid, or two suggestions of a search: equal ones are one trial
    STARTS = auto()  # the start of a sweep and the start that resumes it
    CHECKPOINT = auto()  # a trial and the checkpoint in its folder that it resumes from
    NIGHTS = auto()  # two nights of one study


NOWHERE = Between(0)
EVERYWHERE = Between.CELLS | Between.STARTS | Between.CHECKPOINT | Between.NIGHTS


class Memory(Enum):
    """Which aspect of a value changes the memory of an optimizer step."""

    VALUE = auto()
    WHETHER = auto()  # only whether it is set: neither null nor zero


# Returns what is wrong with a value, to stand after `key=value`; None for a valid value. The reference shows its
# docstring, `Take ...`, as the key's values.
Rule = Callable[[Any], str | None]


@dataclass(frozen=True)
class Key:
    """The metadata of a key.

    Attributes:
        rule: the values that it takes; null is always allowed where the type allows it.
        may_differ: the comparisons in which it does not count.
        memory: the aspect that counts in a memory forecast; None: the key does not count.
        changes_speed: whether another value may change the speed or the peak memory of a step.
        named_by_option: the name of a group's option implies the value, as `sharding=ddp` implies
            `sharding.granularity`.
        is_param: it is logged as an MLflow parameter of the trial.
        named: the name that users type, if it is not the field's.
        example: a value that a message may suggest if the default is null.
    """

    rule: Rule | None = None
    may_differ: Between = NOWHERE
    memory: Memory | None = None
    changes_speed: bool = True
    named_by_option: bool = False
    is_param: bool = True
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


def group(config_class: type, **metadata: Any) -> Any:
    """Return a field that holds a dataclass of keys. Each of them has `metadata` in addition to its own."""
    return field(default_factory=config_class, metadata={"key": Key(**metadata)})


def keys_of(config: Any) -> dict[str, Key]:
    """Return the metadata of every key of a dataclass by its dotted name, in the order of the fields.

    Args:
        config: the class, or a config; a config may also hold the user's keys, the arguments of a callable.
    """
    config_class: Any = config if isinstance(config, type) else type(config)
    if config is config_class:
        return _keys_of(config_class)
    own = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    opened = [name for name, value in own.items() if hasattr(value, "to_keys")]
    if not opened:
        return _keys_of(config_class)
    keys: dict[str, Key] = {}
    for each in dataclasses.fields(config):
        known: Key = each.metadata["key"]
        if not dataclasses.is_dataclass(own[each.name]):
            keys[each.name] = known
            continue
        inner = _open_keys(own[each.name]) if each.name in opened else keys_of(own[each.name])
        keys |= {f"{each.name}.{name}": _within(key, known) for name, key in inner.items()}
    return keys


def _open_keys(group: Any) -> dict[str, Key]:
    """Return the metadata of the keys that an open group has now: of its own, and of its arguments."""
    own = {f.metadata["key"].named or f.name: f.metadata["key"] for f in dataclasses.fields(group)}
    return {n: own["arguments"] if n in group.arguments else own.get(n, own["arguments"]) for n in flatten(group)}


def _within(inner: Key, group: Key) -> Key:
    """Return the metadata of a key of a group, with that of the group added."""
    return dataclasses.replace(
        inner,
        may_differ=inner.may_differ | group.may_differ,
        memory=inner.memory or group.memory,
        changes_speed=inner.changes_speed and group.changes_speed,
        is_param=inner.is_param and group.is_param,
    )


@cache
def _keys_of(config_class: Any) -> dict[str, Key]:
    keys: dict[str, Key] = {}
    for each in dataclasses.fields(config_class):
        known: Key = each.metadata["key"]
        if not dataclasses.is_dataclass(each.default_factory):
            made: Any = each.default_factory  # a group that takes any key has those of its default
            names = made() if each.name == "arguments" else [known.named or each.name]
            keys |= dict.fromkeys(names, known)
            continue
        assert isinstance(each.default_factory, type)
        for name, inner in _keys_of(each.default_factory).items():
            keys[f"{each.name}.{name}"] = _within(inner, known)
    return keys


def check_ranges(config: Any, prefix: str = "") -> None:
    """Apply the rule of each key.

    Args:
        prefix: the dotted path of `config` on the command line, such as `report.`.

    Raises:
        ConfigError: a value breaks its key's rule, or an integer is too large for some store.
    """
    values = flatten(config)
    for name, value in values.items():
        check_range(f"{prefix}{name}", value, None)
    for name, known in keys_of(config).items():
        check_range(f"{prefix}{name}", values[name], known)


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
