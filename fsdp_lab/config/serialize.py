"""Converts typed configs to plain dictionaries and back, for files and messages."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import types
import typing
from collections.abc import Mapping
from enum import Enum
from typing import Any, Self, TypeVar, Union

from fsdp_lab.config.errors import ConfigError

T = TypeVar("T")
_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    list: "a list",
    dict: "a mapping {name: value}",
    type(None): "empty",
}


def to_dict(config: Any) -> dict[str, Any]:
    """Return a nested dictionary of plain values; enums become the names that users type."""
    if hasattr(config, "to_keys"):  # a group that takes any key
        return {name: _plain(value) for name, value in config.to_keys().items()}
    return {f.name: _plain(getattr(config, f.name)) for f in dataclasses.fields(config)}


def value_text(value: Any) -> str:
    """Return a value as it is typed: `null`, `true`, `[1,2]`, `{a:1}`."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(value_text, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{value_text(item)}" for key, item in value.items()) + "}"
    return value.name if isinstance(value, Enum) else str(value)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    return value.name if isinstance(value, Enum) else value


def flatten(config: Any) -> dict[str, Any]:
    """Return `{"optimizer.lr": 0.001, ...}` in the order of the schema, with the names of the command line."""
    return leaves(to_dict(config))


def leaves(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values by their dotted keys; an empty dictionary counts as a value."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= leaves(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def merge(values: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with `over` on top, merged key by key in nested dictionaries."""
    merged = copy.deepcopy(dict(values))
    for name, value in over.items():
        inner = merged.get(name)
        merged[name] = merge(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return merged


def part(config: Any, config_class: type[T]) -> T:
    """Return `config` as its base class `config_class`, with only that class's fields."""
    return config_class(**{f.name: getattr(config, f.name) for f in dataclasses.fields(config_class)})  # type: ignore[arg-type]


def from_dict(cls: type[T], values: dict[str, Any], prefix: str = "") -> T:
    """Build a dataclass from plain values.

    Args:
        values: key -> plain value; groups are dictionaries.
        prefix: the dotted path of `cls` on the command line, such as `report.`, for messages.

    Raises:
        ConfigError: a key that the class lacks (the message lists the valid ones), or a value of another type.
    """
    hints = typing.get_type_hints(cls)
    unknown = [key for key in values if key not in hints]
    if unknown:
        raise ConfigError(f"{prefix}{unknown[0]} is not a key. The keys here are: {', '.join(hints)}.")
    return cls(**{k: typed(hints[k], v, f"{prefix}{k}") for k, v in values.items()})


def typed(hint: Any, value: Any, key: str) -> Any:
    """Return a plain value as the type of its key.

    Args:
        value: a group is a dictionary.
        key: dotted, for messages.

    Raises:
        ConfigError: it is of another type.
    """
    if typing.get_origin(hint) in (Union, types.UnionType):
        if value is None:
            return None
        hint = next(a for a in typing.get_args(hint) if a is not type(None))
    if isinstance(value, dict) and hasattr(hint, "of_keys"):
        return hint.of_keys(value, f"{key}.")
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return from_dict(hint, value, f"{key}.")  # type: ignore[arg-type]
    if isinstance(hint, type) and issubclass(hint, Enum):
        value = "off" if value is False else value  # YAML reads a bare off as false
        if str(value) not in hint.__members__:
            raise ConfigError(f"{key}={value} is not an option. Choose one of: {', '.join(hint.__members__)}.")
        return hint[str(value)]
    if hint is float and isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value)  # YAML reads 1e-3 as text
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if typing.get_origin(hint) is list and isinstance(value, list | str):  # one word is a list of one
        return [typed(typing.get_args(hint)[0], item, key) for item in ([value] if isinstance(value, str) else value)]
    if typing.get_origin(hint) is dict and isinstance(value, dict):
        return {name: typed(typing.get_args(hint)[1], item, f"{key}.{name}") for name, item in value.items()}
    hint = typing.get_origin(hint) or hint
    if hint is not Any and type(value) is not hint:
        is_now, wanted = (_WORDS.get(each, f"a {getattr(each, '__name__', each)}") for each in (type(value), hint))
        raise ConfigError(f"{key}={value_text(value)} is {is_now}; use {wanted}.")
    return value


@dataclasses.dataclass
class OpenGroup:
    """A group with a field `arguments`, whose items appear among the group's own keys: typed, in YAML and in MLflow."""

    @classmethod
    def of_keys(cls, values: dict[str, Any], prefix: str) -> Self:
        """Build the group from the values typed below it.

        Args:
            values: key -> value; unknown keys become arguments, without `_target_` of the default one.
            prefix: the group's dotted path, such as `model.`, for messages.

        Raises:
            ConfigError: an own key has a value of another type.
        """
        names = _typed_names(cls)
        own = {names[name]: value for name, value in values.items() if name in names}
        arguments = {str(name): value for name, value in values.items() if name not in names}
        made: Any = from_dict(cls, own, prefix)
        made.arguments = arguments if "_target_" in values else {**made.arguments, **arguments}
        return made  # type: ignore[no-any-return]

    def to_keys(self) -> dict[str, Any]:
        own = {typed: getattr(self, name) for typed, name in _typed_names(type(self)).items()}
        return {"_target_": own.pop("_target_"), **typing.cast(Any, self).arguments, **own}


class OursOrUsers(OpenGroup):
    """A group with options of ours, or a user's callable; all other keys are the callable's arguments.

    Attributes:
        own_keys: keys that are no arguments of the callable.
    """

    own_keys: typing.ClassVar[tuple[str, ...]]

    @classmethod
    def of_keys(cls, values: dict[str, Any], prefix: str) -> Self:
        """Build the group from the values typed below it.

        Raises:
            ConfigError: a key has a value of another type, or is unknown and there is no `_target_`.
        """
        users = values.get("_target_") is not None
        own = {"name": "custom", **values} if users else values
        made: Any = super().of_keys(
            {name: value for name, value in own.items() if not users or name in cls.own_keys}, prefix
        )
        if users:
            made.arguments = {str(name): value for name, value in values.items() if name not in cls.own_keys}
        elif made.arguments:
            unknown, known = next(iter(made.arguments)), ", ".join(cls().to_keys())
            raise ConfigError(f"{prefix}{unknown} is not a key. The keys here are: {known}.")
        return made  # type: ignore[no-any-return]

    def to_keys(self) -> dict[str, Any]:
        keys, made = super().to_keys(), typing.cast(Any, self)
        return keys if made.target is None else {name: keys[name] for name in self.own_keys} | made.arguments


def _typed_names(cls: type) -> dict[str, str]:
    """Return the name that is typed -> the field, without `arguments`."""
    fields = (f for f in dataclasses.fields(cls) if f.name != "arguments")  # type: ignore[arg-type]
    return {f.metadata["key"].named or f.name: f.name for f in fields}
