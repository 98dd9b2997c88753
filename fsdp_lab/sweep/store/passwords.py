"""Passwords: what is written to a sweep's folder, and how the next start gets them back.

A key whose value may hold one is written as it was typed, redacted: an interpolation stays one. The arguments as they
were typed are only in `sweep.json`, which only its owner can read.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fsdp_lab.compose import Trial
from fsdp_lab.config import ConfigError, SweepConfig, flatten, from_dict, to_dict
from fsdp_lab.config.key import keys_of
from fsdp_lab.redact import redact
from fsdp_lab.sweep.grid import discrete_values
from fsdp_lab.sweep.store.override_rules import key_of

_SECRET_KEYS = frozenset(name for name, key in keys_of(SweepConfig).items() if key.secret)


def config_to_write(trial: Trial) -> dict[str, Any]:
    """Return a trial's config in plain values."""
    content = to_dict(trial.config)
    for name in _SECRET_KEYS:
        group, _, key = name.rpartition(".")
        value = trial.composed[group][key]
        content[group][key] = redact(value) if isinstance(value, str) else value
    return content


def words_to_write(words: Sequence[str]) -> list[str]:
    """Return overrides for any file but `sweep.json`."""
    return [redact(word) if key_of(word) in _SECRET_KEYS else word for word in words]


def words_as_typed(words: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """Return the overrides that `words_to_write` redacted, in their typed form.

    Args:
        words: redacted.
        arguments: of `sweep.json`, or of the command line that stands for it.
    """
    typed = {redact(word): word for word in arguments} | {
        redact(word): word
        for override in _overrides(arguments)
        if not override.is_sweep_override() or override.is_discrete_sweep()
        for word in discrete_values(override)
    }
    return [typed.get(word, word) if key_of(word) in _SECRET_KEYS else word for word in words]


def resolved(saved: SweepConfig) -> SweepConfig:
    """Return a trial's saved config with its secrets resolved now; a secret that cannot be resolved stays as it is."""
    if not any("${" in str(value) for name, value in flatten(saved).items() if name in _SECRET_KEYS):
        return saved
    content = to_dict(saved)
    known = OmegaConf.create(content)
    for name in _SECRET_KEYS:
        group, _, key = name.rpartition(".")
        with suppress(OmegaConfBaseException):
            content[group][key] = OmegaConf.select(known, name)
    return from_dict(SweepConfig, content)


def store_address(config: SweepConfig, arguments: Sequence[str]) -> str:
    """Return the store that a sweep was started with, including its password.

    Args:
        config: of a trial, as saved.
        arguments: of `sweep.json`.

    Raises:
        ConfigError: the folder does not have it.
    """
    uri = config.tracking.uri
    for override in _overrides(arguments):
        given = override.value()
        for value in given.list if isinstance(given, ChoiceSweep) else [given]:
            text = str(getattr(value, "text", value))
            if override.key_or_group == "tracking.uri" and redact(text) == config.tracking.uri:
                uri = text
    uri = resolved(replace(config, tracking=replace(config.tracking, uri=uri))).tracking.uri
    if "${" in uri or "***" in uri:
        raise ConfigError(
            f"tracking.uri={redact(uri)} is incomplete: its password or variable is not set here; add tracking.uri=..."
        )
    return uri


def _overrides(arguments: Sequence[str]) -> list[Override]:
    """Return the overrides of keys that may hold a secret."""
    words = [word for word in arguments if key_of(word) in _SECRET_KEYS]
    return OverridesParser.create().parse_overrides(words)
