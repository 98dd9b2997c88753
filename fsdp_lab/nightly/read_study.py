"""A study from the command line: its settings, its axes, and the arguments of each night's sweep."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser

from fsdp_lab.compose import check, check_overrides, group_choices, nightly_config, register_schema, search_path
from fsdp_lab.config import (
    Between,
    ConfigError,
    all_keys,
    conf_dir,
    is_address,
    settings,
    split_config_dir,
    with_custom,
    workers_of,
)
from fsdp_lab.config.key_value_args import AUTO_REPEAT
from fsdp_lab.config.machine import loader_workers_of
from fsdp_lab.config.nightly import NightlyConfig
from fsdp_lab.config.options import secret_keys
from fsdp_lab.hardware import num_gpus
from fsdp_lab.nightly.study import Study
from fsdp_lab.redact import redact
from fsdp_lab.sweep.grid import all_overrides, discrete_values

_RESUME_KEYS = [key for key in all_keys() if key.startswith("resume")]


@dataclass(frozen=True)
class _Composed:
    """What Hydra makes of the overrides.

    Attributes:
        config: of the study's first setting.
        option: the name of the experiment's preset.
        axes: key -> its overrides, one for each value.
        defaults: key -> the values of an axis that `-m` has without being named; None: none.
    """

    config: NightlyConfig
    option: str
    axes: Mapping[str, Sequence[str]]
    defaults: Mapping[str, Any]


def read_study(overrides: list[str]) -> Study:
    """Return the study that the overrides describe.

    Raises:
        Exception: Hydra or the checks refuse them.
    """
    config_dir, overrides = split_config_dir(overrides)
    overrides, search_words = with_custom(overrides), search_path(config_dir)
    _check_repeats(overrides)
    auto = AUTO_REPEAT in _plain(overrides)
    overrides = [word for word in overrides if word.lstrip("+~") != AUTO_REPEAT]
    if not any(word.startswith("experiment=") for word in overrides):
        overrides = ["experiment=nightly", *overrides]
    composed = _compose(overrides, search_words)
    config = composed.config
    check(config)
    if config.forecast.keep is not None:
        raise ConfigError(
            f"forecast.keep={config.forecast.keep}: a night runs every setting of its study, because a changed "
            "prediction is not a regression; leave it out."
        )
    folder = [f"--config-dir={config_dir}"] if config_dir is not None else []
    arguments = [*folder, *_repeats(config, overrides, auto), *_axes(composed, overrides)]
    judged = _settings(composed)
    secret = [word for word in overrides if word.lstrip("+").partition("=")[0] in secret_keys()]
    shown = [f"{word.partition('=')[0]}=***" if word in secret else word for word in overrides]
    path = config.cluster.storage_path
    return Study(
        composed.option,
        Path(config.nightly.folder) / composed.option,
        config.nightly,
        config.tracking,
        arguments,
        judged,
        shares_cores=judged["device"] == "cpu" and config.cluster.is_here,
        resume_command=redact(shlex.join(["python", "-m", "fsdp_lab.nightly", "--continue", *folder, *shown])),
        storage=path if is_address(path) else None,
        cluster=config.cluster,
    )


def _plain(overrides: Sequence[str]) -> list[str]:
    return [word.lstrip("+~") for word in overrides]


def _check_repeats(overrides: Sequence[str]) -> None:
    """Refuse keys that a night sets itself."""
    words = _plain(overrides)
    if resumes := [word for word in words if word.partition("=")[0] in _RESUME_KEYS]:
        raise ConfigError(f"{resumes[0]}: an interrupted night resumes by itself; leave it out.")
    if repeats := [word for word in words if word.startswith("repeat=") and word != AUTO_REPEAT]:
        raise ConfigError(
            f"{repeats[0]}: nightly.repeats=3 sets how often a night trains each setting; leave it out. With "
            "repeat=auto it is the maximum, and only undecided settings are repeated."
        )


def _compose(overrides: list[str], search_words: Sequence[str]) -> _Composed:
    """Compose the first setting, and list the values of each axis."""
    check_overrides(overrides)
    register_schema()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
        parsed = parser.parse_overrides(overrides)
        plain = [o.input_line or "" for o in parsed if not o.is_sweep_override()]
        defaults: dict[str, Any] = compose(
            "config", [*plain, *search_words], return_hydra_config=True
        ).hydra.sweeper.params
        given = all_overrides(parser, {k: None if v is None else str(v) for k, v in defaults.items()}, overrides)
        axes = {o.get_key_element(): discrete_values(o) for o in given.values()}
        if several := [
            key for key, values in axes.items() if key.lstrip("+").startswith("nightly.") and len(values) > 1
        ]:
            raise ConfigError(
                f"{several[0]} has several values, but takes one; quote a value with a comma: "
                f"\"{several[0]}='0 2,14 * * *'\"."
            )
        first = [values[0] for values in axes.values()]
        cfg = compose("config", [*first, *search_words], return_hydra_config=True)
    config = nightly_config(cfg)
    return _Composed(config, group_choices(cfg).get("experiment", "nightly"), axes, defaults)


def _settings(composed: _Composed) -> dict[str, Any]:
    """Return what nights must have in common to be compared."""
    config, axes = composed.config, composed.axes
    swept = {key.lstrip("+") for key, values in axes.items() if len(values) > 1}
    judged = {
        key: value
        for key, value in settings(config, Between.NIGHTS).items()
        if key.partition(".")[0] not in swept and key not in swept
    }
    if "data.loader_workers" in judged:  # as a number: nights before null wrote one, and it changes what is measured
        judged["data.loader_workers"] = loader_workers_of(config)
    judged |= {"workers": workers_of(config), "device": "cuda" if num_gpus() else "cpu"}
    return judged | {f"axis {key}": ",".join(v.partition("=")[2] for v in axes[key]) for key in sorted(swept)}


def _repeats(config: NightlyConfig, overrides: Sequence[str], auto: bool) -> list[str]:
    """Return the arguments that repeat each setting."""
    repeats = config.nightly.repeats
    if not auto:
        return [f"repeat={','.join(map(str, range(repeats)))}"] if repeats > 1 else []
    if repeats < 2:
        raise ConfigError(f"repeat=auto with nightly.repeats={repeats}: nothing can repeat; use 2 or more.")
    if most := [word for word in _plain(overrides) if word.startswith("repeat_max=")]:
        raise ConfigError(f"{most[0]}: nightly.repeats is the maximum number of rounds; leave it out.")
    return [AUTO_REPEAT, f"repeat_max={repeats}"]


def _axes(composed: _Composed, overrides: Sequence[str]) -> list[str]:
    """Return the arguments for the axes, in the order of the words.

    The default axes are typed, and out of the way of Hydra's own: the repeats then lie as far apart as they can.
    """
    typed = [w for w in overrides if not w.lstrip("+~").startswith(("nightly.", "hydra.sweep.dir="))]
    named = {w.partition("=")[0] for w in typed}
    defaults = {key: value for key, value in composed.defaults.items() if value is not None}
    default_axes = [f"{key}={value}" for key, value in defaults.items() if key not in named]
    return [*default_axes, *typed, *(f"hydra.sweeper.params.{key}=null" for key in defaults)]
