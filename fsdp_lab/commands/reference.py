"""The reference on a terminal: versions, and every key with its values. `docs/tables.py` makes pages of it."""

from __future__ import annotations

import importlib.metadata
import platform
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace

import fsdp_lab
from fsdp_lab.config import ConfigError, all_keys
from fsdp_lab.config.describe import KeyDescription, describe_keys
from fsdp_lab.config.options import groups, option_values, options_of
from fsdp_lab.config.serialize import leaves, value_text
from fsdp_lab.config.suggest import did_you_mean

_LIBRARIES = ("torch", "ray", "mlflow", "hydra-core")  # versions to name in a bug report


def versions() -> str:
    """Return a line with the version of fsdp_lab, of Python and of the libraries, without importing them."""
    libraries = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _LIBRARIES)
    return f"fsdp_lab {fsdp_lab.__version__} (Python {platform.python_version()}, {libraries})"


def keys_text(parts: Sequence[str], width: int) -> str:
    """Return the keys for a terminal: each with its default, its values and its meaning.

    Args:
        parts: print only keys that contain one of these, or that an option such as `model=llama3_8b` sets; empty: all
            keys.
        width: of the terminal, in characters.

    Raises:
        ConfigError: no key contains a part, or there is no such option.
    """
    keys = [key for _, _, keys in describe_keys() for key in keys]
    options = [part for part in parts if "=" in part]
    set_by = [key for option in options for key in _keys_of_option(option, keys)]
    parts = [part for part in parts if part not in options]
    for part in parts:
        if not any(part in key.name for key in keys):
            meant = did_you_mean(part, all_keys())
            raise ConfigError(f"--keys {part}: no key contains it. {meant}--keys alone prints every key.")
    shown = [key for key in keys if not (parts or set_by) or any(part in key.name for part in parts)]
    return "\n".join(line for key in (*set_by, *shown) for line in _key_lines(key, width))


def _keys_of_option(option: str, keys: Sequence[KeyDescription]) -> Iterator[KeyDescription]:
    """Yield the keys that an option sets, each with its value there."""
    group, _, name = option.partition("=")
    if group not in groups() or name not in options_of(group):
        known = [f"{group}={each}" for each in options_of(group)] if group in groups() else groups()
        meant = did_you_mean(option if group in groups() else group, known)
        raise ConfigError(f"--keys {option}: no such option. {meant}Choose one of: {', '.join(known)}.")
    described = {key.name: key for key in keys}
    for key, value in leaves(option_values(group, name), "" if group == "experiment" else f"{group}.").items():
        unknown = KeyDescription(key, "", "", "", f"Set by {option}.")
        yield replace(described.get(key, unknown), default=value_text(value))


def _key_lines(key: KeyDescription, width: int) -> Iterator[str]:
    yield f"{key.name}={key.default}"
    for text in filter(None, (values_text(key), key.meaning)):
        yield from textwrap.wrap(text.replace("`", ""), width, initial_indent="    ", subsequent_indent="    ")


def values_text(key: KeyDescription) -> str:
    return f"{key.kind}: {key.takes}" if key.takes else key.kind
