"""A study from the command line: its settings, its axes, and the arguments of each night's sweep."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser

from fsdp_lab.config import (
    Between,
    ConfigError,
    NightlyConfig,
    all_keys,
    conf_dir,
    settings,
    split_config_dir,
    with_custom,
    workers_of,
)
from fsdp_lab.config.compose import check, group_choices, nightly_config, register_schema
from fsdp_lab.config.convert import value_text
from fsdp_lab.config.key_value_args import key_of, with_environment
from fsdp_lab.config.machine import loader_workers_of
from fsdp_lab.config.overrides import read_overrides, search_path
from fsdp_lab.config.wording import count
from fsdp_lab.machine.hardware import cpu_name, gpus, num_gpus
from fsdp_lab.nightly.nights import Night
from fsdp_lab.sweep.grid import all_overrides, discrete_values, fixed_words

_NOT_HERE = {  # keys that a night sets itself
    **{key: "a night always trains anew" for key in all_keys() if key.startswith("resume")},
    "dry_run": "it lists the trials of python -m fsdp_lab",
    **dict.fromkeys(("repeat", "repeats"), "nightly.repeats=3 sets how often a night trains each setting"),
}


@dataclass(frozen=True)
class Study:
    """The sweep that runs every night.

    Attributes:
        folder: its own, below `nightly.folder`.
        config: of its first setting.
        arguments: of its sweep. All axes are named, the repeats first, so that they are as far apart in time as
            possible.
        settings: the ones that all its trials share.
    """

    name: str
    folder: Path
    config: NightlyConfig
    arguments: list[str]
    settings: dict[str, Any]

    def machine(self, measured_on: Iterable[str] = ()) -> str:
        """Return the devices of trials, or else those of this machine, and how many: the same have the same speeds.

        A host's name says nothing: in a cluster it is new every night.
        """
        devices = set(measured_on) - {"", "cpu"} or {gpu.name for gpu in gpus()} or {cpu_name()}
        return f"{' and '.join(sorted(devices))}, {count(self.settings['workers'], 'worker')}"

    def differences(self, night: Night) -> list[str]:
        """Return how it differs from a night's study, such as `training.epochs was 3 and is 2`."""
        here, there = self.settings, night.study
        # a key that one of them does not have is of other code, but for an axis: that one varied nothing
        keys = [k for k in sorted(here.keys() | there.keys()) if (k in here and k in there) or k.startswith("axis ")]
        return [
            f"{k} was {value_text(there.get(k, 'one value'))} and is {value_text(here.get(k, 'one value'))}"
            for k in keys
            if there.get(k) != here.get(k)
        ]


def read_study(overrides: list[str]) -> Study:
    """Return the study that the overrides describe.

    Raises:
        Exception: Hydra or the checks refuse them.
    """
    config_dir, overrides = split_config_dir(overrides)
    search_words = search_path(config_dir)
    overrides = with_environment(with_custom(read_overrides(overrides, config_dir)))
    for word in overrides:
        if reason := _NOT_HERE.get(key_of(word)):
            raise ConfigError(f"{word}: {reason}; leave it out.")
    if not any(word.startswith("experiment=") for word in overrides):
        overrides = ["experiment=nightly", *overrides]
    config, name, axes, defaults = _compose(overrides, search_words)
    check(config)
    if config.forecast.keep is not None:
        raise ConfigError(
            f"forecast.keep={config.forecast.keep}: a night runs every setting of its study, because a changed "
            "prediction is not a regression; leave it out."
        )
    code = [f"--config-dir={config_dir}"] if config_dir is not None else []
    numbers = ",".join(map(str, range(config.nightly.repeats)))
    return Study(
        name,
        Path(config.nightly.folder) / name,
        config,
        [*code, *([f"repeat={numbers}"] if config.nightly.repeats > 1 else []), *_axes(defaults, overrides)],
        _settings(config, axes),
    )


def _compose(
    overrides: list[str], search_words: Sequence[str]
) -> tuple[NightlyConfig, str, dict[str, list[str]], dict[str, Any]]:
    """Return the config of the study's first setting, and the name of its preset.

    Then each axis, with an override for each value; and the default axes of `-m`, with their values; None: none.
    """
    register_schema()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
        shared = [*fixed_words(parser, {}, overrides), *search_words]  # a preset among them brings axes of its own
        defaults = dict(compose("config", shared, return_hydra_config=True).hydra.sweeper.params)
        axes = {o.get_key_element(): discrete_values(o) for o in all_overrides(parser, defaults, overrides).values()}
        own = [key for key, values in axes.items() if key.lstrip("+").startswith("nightly.") and len(values) > 1]
        if own:
            raise ConfigError(
                f"{own[0]} has several values, but takes one; quote a value with a comma: \"{own[0]}='0 2,14 * * *'\"."
            )
        first = [values[0] for values in axes.values()]
        cfg = compose("config", [*first, *search_words], return_hydra_config=True)
    return nightly_config(cfg), group_choices(cfg).get("experiment", "nightly"), axes, defaults


def _settings(config: NightlyConfig, axes: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return what nights must have in common to be compared."""
    swept = {key.lstrip("+") for key, values in axes.items() if len(values) > 1}
    judged = {
        key: value
        for key, value in settings(config, Between.NIGHTS).items()
        if key.partition(".")[0] not in swept and key not in swept
    }
    if "data.loader_workers" in judged:  # as a number: what null stands for changes what is measured
        judged["data.loader_workers"] = loader_workers_of(config)
    judged |= {"workers": workers_of(config), "device": "cuda" if num_gpus() else "cpu"}
    return judged | {f"axis {key}": ",".join(v.partition("=")[2] for v in axes[key]) for key in sorted(swept)}


def _axes(defaults: Mapping[str, Any], overrides: Sequence[str]) -> list[str]:
    """Return the arguments for the axes, in the order of the words.

    The default axes are typed, and out of the way of Hydra's own: the repeats then lie as far apart as they can.
    """
    typed = [w for w in overrides if not w.lstrip("+~").startswith(("nightly.", "hydra.sweep.dir="))]
    named = {w.partition("=")[0] for w in typed}
    own = {key: value for key, value in defaults.items() if value is not None}
    default_axes = [f"{key}={value}" for key, value in own.items() if key not in named]
    return [*default_axes, *typed, *(f"hydra.sweeper.params.{key}=null" for key in own)]
