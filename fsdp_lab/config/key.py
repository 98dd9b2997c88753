"""What a field of the configuration says beside its type and default: the values that it takes, and where it counts."""

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
    """Pairs of configs that are compared. A key counts in each comparison, unless its field lets it differ there."""

    CELLS = auto()  # two cells of a grid, or two suggestions of a search: equal ones are one trial
    STARTS = auto()  # the start of a sweep and the start that resumes it
    CHECKPOINT = auto()  # a trial and the checkpoint in its folder that it resumes from
    NIGHTS = auto()  # two nights of one study


NOWHERE = Between(0)
EVERYWHERE = Between.CELLS | Between.STARTS | Between.CHECKPOINT | Between.NIGHTS


class Memory(Enum):
    """What of a value changes the memory of an optimizer step."""

    VALUE = auto()
    WHETHER = auto()  # only whether it is set: neither null nor zero


class Secret(Enum):
    """What of a value must not be shown."""

    CREDENTIALS = auto()  # the user and password of an address
    VALUE = auto()  # all of it


# Returns what is wrong with a value, to stand after `key=value`; None where nothing is.
Rule = Callable[[Any], str | None]


@dataclass(frozen=True)
class Key:
    """The metadata of a key.

    Attributes:
        rule: the values that it takes; null is always allowed where the type allows it.
        may_differ: the comparisons in which it does not count.
        memory: what of it counts in a forecast of memory; None: nothing.
        secret: what of it must not be shown; None: nothing.
        changes_speed: whether another value may change the speed or the peak memory of a step.
        named_by_option: an option of its group says it by its name, as `sharding=ddp` says `sharding.granularity`.
        is_param: it is logged as an MLflow parameter of the trial.
        before_null: what versions wrote that had a number instead of null as its default.
        named: what is typed for it, where that is not the field's name.
        example: a value that a message may suggest, where the default is null.
    """

    rule: Rule | None = None
    may_differ: Between = NOWHERE
    memory: Memory | None = None
    secret: Secret | None = None
    changes_speed: bool = True
    named_by_option: bool = False
    is_param: bool = True
    before_null: Any = None
    named: str | None = None
    example: Any = None


def key(default: Any, rule: Rule | None = None, **metadata: Any) -> Any:
    """Return a field with the metadata of `Key`.

    Args:
        default: the value, or a function that makes it.
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
        config: the class, or a config, which may hold keys of the user's: arguments of a callable.
    """
    config_class: Any = config if isinstance(config, type) else type(config)
    if config is config_class:
        return _keys_of(config_class)
    own = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    opened = [name for name, value in own.items() if hasattr(value, "to_keys")]
    if not opened:
        return _keys_of(config_class)
    found: dict[str, Key] = {}
    for each in dataclasses.fields(config):
        known: Key = each.metadata["key"]
        if not dataclasses.is_dataclass(own[each.name]):
            found[each.name] = known
            continue
        inner = _open_keys(own[each.name]) if each.name in opened else keys_of(own[each.name])
        found |= {f"{each.name}.{name}": _within(key, known) for name, key in inner.items()}
    return found


def _open_keys(group: Any) -> dict[str, Key]:
    """Return the metadata of the keys that an open group has now: of its own, and of its arguments."""
    own = {f.metadata["key"].named or f.name: f.metadata["key"] for f in dataclasses.fields(group)}
    return {name: own.get(name, own["arguments"]) for name in flatten(group)}


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
    found: dict[str, Key] = {}
    for each in dataclasses.fields(config_class):
        known: Key = each.metadata["key"]
        if not dataclasses.is_dataclass(each.default_factory):
            found[each.name] = known
            continue
        assert isinstance(each.default_factory, type)
        for name, inner in _keys_of(each.default_factory).items():
            found[f"{each.name}.{name}"] = _within(inner, known)
    return found


def check_ranges(config: Any, prefix: str = "") -> None:
    """Apply the rule of each key.

    Args:
        prefix: where `config` stands on the command line, such as `report.`.

    Raises:
        ConfigError: a value that breaks its key's rule, or an integer that not every store keeps.
    """
    values = flatten(config)
    for name, value in values.items():
        if type(value) is int and abs(value) > LARGEST_INTEGER:
            raise ConfigError(f"{prefix}{name}={value} is too large; use at most {LARGEST_INTEGER}.")
    for name, known in keys_of(config).items():
        value = values[name]
        if known.rule is not None and value is not None and (wrong := known.rule(value)):
            raise ConfigError(f"{prefix}{name}={value} {wrong}.")


def at_least_one(value: float) -> str | None:
    return None if value >= 1 else "is below 1; use a whole number of 1 or more"


def not_negative(value: float) -> str | None:
    return None if value >= 0 else "is negative; use 0 or more"


def positive(value: float) -> str | None:
    if not value > 0:
        return "is not above 0; use a positive number"
    return None if math.isfinite(value) else "is not finite; use a number"


def below_one(value: float) -> str | None:
    return None if 0 <= value < 1 else "is outside [0, 1); use for example 0.9"


def share(value: float) -> str | None:
    return None if 0 <= value <= 1 else "is outside [0, 1]; use for example 0.5"


def divisors(number: int) -> str:
    """Return the divisors of a number as text, for the remedy of a message."""
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)
