"""A config of `group=option` and `key=value` on top of a file, composed where Hydra is not installed.

`python -m fsdp_lab.training` needs only PyTorch and a YAML reader; it supports neither sweeps nor presets.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from fsdp_lab.config.errors import ConfigError
from fsdp_lab.config.nightly import NightlyConfig
from fsdp_lab.config.options import OPEN_GROUPS, conf_dir, group_dirs
from fsdp_lab.config.serialize import from_dict, merge, to_dict
from fsdp_lab.config.words import with_custom
from fsdp_lab.config.workload import known_vocab_size


def read_config(base: Path | None, overrides: list[str]) -> NightlyConfig:
    """Return the defaults, or a composed config's file, with overrides on top.

    Args:
        base: a YAML file; None: the defaults.
        overrides: `group=option` and `key=value`.

    Raises:
        ConfigError: an unknown key or option, or a value of the wrong type.
    """
    values = to_dict(NightlyConfig())
    if base is not None:
        composed = yaml.safe_load(base.read_text()) or {}
        values = merge(values, composed) | {group: composed[group] for group in OPEN_GROUPS if group in composed}
    pairs = [override.partition("=")[::2] for override in with_custom(overrides)]
    for key, text in sorted(pairs, key=lambda pair: conf_dir() / pair[0] not in group_dirs()):  # options first
        group = conf_dir() / key
        value = _read_option(group, text) if group in group_dirs() else yaml.safe_load(text)
        if key in OPEN_GROUPS and "_target_" in value:  # drop the arguments of another callable
            values = {**values, key: {}}
        for name in reversed(key.split(".")):
            value = {name: value}
        values = merge(values, value)
    return from_dict(NightlyConfig, _resolved(values, values))


def _read_option(group: Path, option: str) -> Any:
    """Return the values of a group's option.

    Raises:
        ConfigError: the group has no such option.
    """
    options = {file.stem: file for file in sorted(group.glob("*.yaml"))}
    if option not in options:
        raise ConfigError(f"{group.name}={option} is not an option. Choose one of: {', '.join(options)}.")
    return yaml.safe_load(options[option].read_text())


def _resolved(value: Any, root: dict[str, Any]) -> Any:
    """Return `value` with each `${group.key}`, which options use, replaced by the value of that key.

    Args:
        value: plain values in any nesting.
        root: the whole config.

    Raises:
        ConfigError: there is no such key.
    """
    if isinstance(value, dict):
        return {key: _resolved(item, root) for key, item in value.items()}
    if not isinstance(value, str) or not (named := re.fullmatch(r"\$\{([\w.]+)\}", value)):
        return value
    node: Any = root
    for name in named[1].split("."):
        if not isinstance(node, dict) or name not in node:
            if named[1] == "model.vocab_size" and (size := known_vocab_size(root["model"])):
                return size
            raise ConfigError(f"{value} refers to {named[1]}, which is not set; give the key that uses it a value.")
        node = node[name]
    return node
