"""Lists every key with its meaning, from the docstring below the field."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

from fsdp_lab.config.key import Key, keys_of
from fsdp_lab.config.nightly import NightlyConfig
from fsdp_lab.config.options import OPEN_GROUPS, REGISTRY, groups, option_values
from fsdp_lab.config.serialize import flatten, to_dict, value_text
from fsdp_lab.config.suggest import did_you_mean
from fsdp_lab.config.target import import_callable

_NOUNS = {bool: "true or false", int: "whole number", float: "number", str: "text"}


@dataclass(frozen=True)
class KeyDescription:
    """A key as the reference shows it.

    Attributes:
        name: dotted, as it is typed; `<argument>` stands for an argument of the user's callable.
        kind: its type in words.
        default: as it is typed.
        takes: the allowed values; "" for all of the kind.
        meaning: one sentence or two, in Markdown.
    """

    name: str
    kind: str
    default: str
    takes: str
    meaning: str


def all_keys() -> list[str]:
    """Return every key that can be typed, dotted."""
    return list(keys_of(NightlyConfig))


@cache
def text_keys() -> frozenset[str]:
    """Return the keys whose value is text."""
    return frozenset(_text_keys(NightlyConfig, ""))


def _text_keys(config_class: type, prefix: str) -> Iterator[str]:
    hints = typing.get_type_hints(config_class)
    for each in dataclasses.fields(config_class):
        if isinstance(each.default_factory, type) and dataclasses.is_dataclass(each.default_factory):
            yield from _text_keys(each.default_factory, f"{prefix}{each.name}.")
        elif hints[each.name] in (str, str | None):
            yield f"{prefix}{each.metadata['key'].named or each.name}"


@cache
def values_implied_by_option(group: str, option: str) -> dict[str, Any]:
    """Return the values that the name of a group's option implies, such as `{"sharding.granularity": "per_block"}`."""
    values = option_values(group, option)
    defaults, keys = flatten(NightlyConfig()), keys_of(NightlyConfig)
    implied = [name for name in keys if name.startswith(f"{group}.") and keys[name].named_by_option]
    return {name: values.get(name.partition(".")[2], defaults[name]) for name in implied}


def valid_keys(key: str) -> str:
    """Return sentences that list the keys and groups, and suggest the one that was probably meant."""
    prefix = key.split(".")[0].lstrip("+~")
    same = [k for k in all_keys() if k.startswith(f"{prefix}.")]
    if "." in key and same:
        known = [*same, *(f"{group}._target_" for group in OPEN_GROUPS if group == prefix)]
        return (
            f"{did_you_mean(key, known) or did_you_mean(key, all_keys())}The keys of {prefix} are: {', '.join(same)}."
        )
    top = sorted({k.split(".")[0] for k in all_keys()})
    meant = did_you_mean(key, [*groups(), *top, *all_keys()])
    return f"{meant}The groups are: {', '.join(groups())}. The keys begin with: {', '.join(top)}."


def docstring(of: Any) -> str:
    """Return the docstring of a module, a class or a function from its source: `python -OO` drops `__doc__`."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(of)))
    described = tree if inspect.ismodule(of) else tree.body[0]
    assert isinstance(described, ast.Module | ast.ClassDef | ast.FunctionDef)
    return ast.get_docstring(described) or ""


def describe_keys(
    config_class: Any = NightlyConfig, group: str = ""
) -> Iterator[tuple[str, str, list[KeyDescription]]]:
    """Yield the name of each group, a sentence about it and its keys, in the order of the schema.

    Keys without a group come first: their group is "".
    """
    yield group, docstring(config_class).partition("\n")[0], _keys(config_class, f"{group}." if group else "")
    for each in dataclasses.fields(config_class):
        if dataclasses.is_dataclass(each.default_factory):
            yield from describe_keys(each.default_factory, f"{group}.{each.name}".lstrip("."))


def _keys(config_class: type, prefix: str) -> list[KeyDescription]:
    hints, descriptions = typing.get_type_hints(config_class), _meanings(config_class)
    values = dataclasses.asdict(config_class()) if hasattr(config_class, "to_keys") else to_dict(config_class())
    keys: list[KeyDescription] = []
    for each in dataclasses.fields(config_class):
        if dataclasses.is_dataclass(each.default_factory):
            continue
        known: Key = each.metadata["key"]
        if each.name == "arguments" and values[each.name]:
            keys += _arguments(values["target"], values[each.name], prefix)
        name = "<argument>" if each.name == "arguments" else known.named or each.name
        hint, optional = _without_none(hints[each.name])
        kind = "anything" if name == "<argument>" else _kind(hint) + (" or null" if optional else "")
        default = "" if name == "<argument>" else value_text(values[each.name])
        takes = _takes(f"{prefix}{name}", hint, known)
        keys.append(KeyDescription(f"{prefix}{name}", kind, default, takes, descriptions.get(each.name, "")))
    return keys


def _arguments(target: str, values: dict[str, Any], prefix: str) -> Iterator[KeyDescription]:
    """Yield the arguments of a group's default target, with the meanings in its docstring."""
    text = docstring(import_callable(target, f"{prefix}_target_").__call__)
    described = dict(re.findall(r"^ +(\w+): (.+)$", text, re.MULTILINE))
    for name, value in values.items():
        meaning = described[name][:1].upper() + described[name][1:]
        yield KeyDescription(f"{prefix}{name}", _NOUNS[type(value)], value_text(value), "", meaning)


def _without_none(hint: Any) -> tuple[Any, bool]:
    arguments = [a for a in typing.get_args(hint) if a is not type(None)]
    optional = len(arguments) < len(typing.get_args(hint))
    return (arguments[0], True) if optional else (hint, False)


def _kind(hint: Any) -> str:
    if typing.get_origin(hint) is list:
        return "list of text"
    if typing.get_origin(hint) is dict:
        return "mapping of text"
    return "choice" if isinstance(hint, type) and issubclass(hint, Enum) else _NOUNS[hint]


def _takes(name: str, hint: Any, known: Key) -> str:
    """Return the allowed values of a key; for a key that a group's option sets, the values of the options."""
    if isinstance(hint, type) and issubclass(hint, Enum):
        return ", ".join(f"`{member}`" for member in hint.__members__)
    if name in REGISTRY:
        return ", ".join(f"`{entry}`" for entry in REGISTRY[name])
    rule = (known.rule.__doc__ or docstring(known.rule)) if known.rule else ""
    return rule.removeprefix("Take ").rstrip(".")


def _meanings(config_class: type) -> dict[str, str]:
    """Return field -> the docstring below it, of a dataclass and of its bases, from their source."""
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
