"""What each key means, for the reference: read from the docstrings below the fields."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

from fsdp_lab.config.convert import to_dict
from fsdp_lab.config.key import Key
from fsdp_lab.config.nightly import NightlyConfig
from fsdp_lab.config.registry import REGISTRY
from fsdp_lab.config.workload import UserData, UserModel

_NOUNS = {bool: "true or false", int: "whole number", float: "number", str: "text"}


@dataclass(frozen=True)
class KeyDescription:
    """A key as the reference shows it.

    Attributes:
        name: dotted, as it is typed; `<argument>` stands for an argument of the user's callable.
        kind: its type in words.
        default: as it is typed.
        takes: the values that are allowed; "" for all of the kind.
        meaning: one sentence or two, in Markdown.
    """

    name: str
    kind: str
    default: str
    takes: str
    meaning: str


@dataclass(frozen=True)
class GroupDescription:
    """A group of keys as the reference shows it.

    Attributes:
        name: "" for keys without a group.
        about: one sentence about the group.
        keys: in the order of the schema.
    """

    name: str
    about: str
    keys: list[KeyDescription]


def describe_keys() -> list[GroupDescription]:
    """Return every key that can be typed, in the order of the schema; keys without a group come first."""
    descriptions = list(_groups(NightlyConfig, ""))
    for name, config_class in (("model", UserModel), ("data", UserData)):
        at = next(i for i, group in enumerate(descriptions) if group.name == name)
        known = {key.name for key in descriptions[at].keys}
        added = [key for key in _keys(config_class, f"{name}.") if key.name not in known]
        descriptions.insert(at + 1, GroupDescription(f"{name}, your own", _first_line(config_class), added))
    return descriptions


def _groups(config_class: type, prefix: str) -> Iterator[GroupDescription]:
    about = "Keys without a group." if not prefix else _first_line(config_class)
    yield GroupDescription(prefix.rstrip("."), about, _keys(config_class, prefix))
    for each in dataclasses.fields(config_class):
        if isinstance(each.default_factory, type) and dataclasses.is_dataclass(each.default_factory):
            yield from _groups(each.default_factory, f"{prefix}{each.name}.")


def _keys(config_class: type, prefix: str) -> list[KeyDescription]:
    hints, descriptions = typing.get_type_hints(config_class), meanings(config_class)
    values = dataclasses.asdict(config_class()) if hasattr(config_class, "to_keys") else to_dict(config_class())
    keys = []
    for each in dataclasses.fields(config_class):
        known: Key = each.metadata["key"]
        if dataclasses.is_dataclass(each.default_factory):
            continue
        name = "<argument>" if each.name == "arguments" else known.named or each.name
        hint, optional = _without_none(hints[each.name])
        kind = "anything" if name == "<argument>" else _kind(hint) + (" or null" if optional else "")
        default = "" if name == "<argument>" else _typed(values[each.name])
        takes = _takes(f"{prefix}{name}", hint, known)
        keys.append(KeyDescription(f"{prefix}{name}", kind, default, takes, descriptions.get(each.name, "")))
    return keys


def _without_none(hint: Any) -> tuple[Any, bool]:
    arguments = [a for a in typing.get_args(hint) if a is not type(None)]
    optional = len(arguments) < len(typing.get_args(hint))
    return (arguments[0], True) if optional else (hint, False)


def _kind(hint: Any) -> str:
    if typing.get_origin(hint) is list:
        return "list of text"
    return "choice" if isinstance(hint, type) and issubclass(hint, Enum) else _NOUNS[hint]


def _takes(name: str, hint: Any, known: Key) -> str:
    """Return the values that a key takes; of one that a group's option sets, those of the options."""
    if isinstance(hint, type) and issubclass(hint, Enum):
        return ", ".join(f"`{member}`" for member in hint.__members__)
    if name in REGISTRY:
        return ", ".join(f"`{entry}`" for entry in REGISTRY[name])
    rule = (known.rule.__doc__ or "") if known.rule else ""
    return rule.removeprefix("Take ").rstrip(".")


def _typed(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(_typed, value))}]"
    return value.name if isinstance(value, Enum) else str(value)


def _first_line(config_class: type) -> str:
    return (config_class.__doc__ or "").strip().partition("\n")[0]


@cache
def meanings(config_class: type) -> dict[str, str]:
    """Return field -> the docstring below it, of a dataclass and of its bases.

    Reads their source. Fields without a docstring are left out.
    """
    descriptions: dict[str, str] = {}
    for each in reversed(config_class.__mro__):
        if not dataclasses.is_dataclass(each):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(each))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, below in zip(body.body, body.body[1:], strict=False):
            text = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else None
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, str):
                descriptions[field.target.id] = " ".join(text.split())
    return descriptions
