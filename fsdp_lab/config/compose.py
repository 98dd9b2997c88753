"""Converts Hydra's composed config to the typed one, once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from fsdp_lab.config import (
    ConfigError,
    NightlyConfig,
    SweepConfig,
    all_keys,
    default_num_workers,
    flatten,
    from_dict,
    part,
    to_dict,
)
from fsdp_lab.config.address import check_credentials
from fsdp_lab.config.checks import check_hydra
from fsdp_lab.config.describe import valid_keys
from fsdp_lab.config.options import OPEN_GROUPS
from fsdp_lab.config.serialize import leaves
from fsdp_lab.config.training import LrScheduleConfig, OptimizerConfig
from fsdp_lab.config.words import with_overrides
from fsdp_lab.config.workload import DataConfig, ModelConfig, known_vocab_size

_KEYS = frozenset(all_keys())


@dataclass(frozen=True)
class Trial:
    """One composed trial.

    Attributes:
        index: its number in the sweep; None: alone.
        choices: group -> option.
        overrides: its command line.
        composed: the composed config with Hydra's part, as plain values without interpolation.
        resumed: overrides of the resume that trained it.
        changed: `key=value` of keys that differ between that resume and the start of the sweep.
    """

    index: int | None
    config: SweepConfig
    choices: dict[str, str]
    overrides: list[str]
    folder: Path
    composed: dict[str, Any]
    resumed: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)

    @property
    def words(self) -> list[str]:
        """The command line that trains it again, with the overrides of a resume."""
        return with_overrides(self.overrides, self.resumed)

    @property
    def hydra_config(self) -> DictConfig:
        """The composed config as Hydra returns it, except for the types."""
        return OmegaConf.create(self.composed)

    @cached_property
    def values(self) -> dict[str, Any]:
        return flatten(self.config)

    @property
    def name(self) -> str:
        """The trial's overrides, which distinguish it, or `trial` without any."""
        return " ".join(self.overrides) or "trial"


def variables_in(composed: Mapping[str, Any]) -> dict[str, str]:
    """Return the values that name a variable of the environment, as typed, by their dotted keys."""
    own = leaves({key: value for key, value in composed.items() if key != "hydra"})
    return {key: value for key, value in own.items() if isinstance(value, str) and "${oc.env:" in value}


def with_typed(values: dict[str, Any], typed: Mapping[str, Any]) -> dict[str, Any]:
    """Set values by their dotted keys, and return the same."""
    for key, value in typed.items():
        *groups_, name = key.split(".")
        inner = values
        for group in groups_:
            inner = inner.setdefault(group, {})
        inner[name] = value
    return values


@dataclass
class Schema(NightlyConfig):
    """The schema of a composed config.

    Groups that accept any key have the keys of their option and the typed ones. `objective` is a list or one word.
    """

    model: dict[str, Any] = field(default_factory=dict)  # type: ignore[assignment]
    data: dict[str, Any] = field(default_factory=dict)  # type: ignore[assignment]
    optimizer: dict[str, Any] = field(default_factory=dict)  # type: ignore[assignment]
    lr_schedule: dict[str, Any] = field(default_factory=dict)  # type: ignore[assignment]
    objective: Any = field(default_factory=lambda: NightlyConfig().objective)


def register_schema() -> None:
    """Let Hydra check every override against the dataclasses, except for groups that accept any key."""
    schema = OmegaConf.structured(Schema)
    for group in OPEN_GROUPS:
        OmegaConf.set_struct(schema[group], False)  # a node's own flag wins over the root's
    schema.task.name = "custom"  # for a user's option without a name; ours set theirs
    ConfigStore.instance().store(name="schema", node=schema, provider="fsdp_lab")
    OmegaConf.register_new_resolver("per_worker", _per_worker, replace=True)


def _per_worker(count: int, *, _root_: DictConfig) -> int:
    """Return a batch size that grows with the workers: `training.global_batch_size='${per_worker:8}'`.

    Tensor-parallel workers share their samples.
    """
    if not str(count).isdecimal():
        raise ConfigError(f"${{per_worker:{count}}} needs a whole number, for example ${{per_worker:8}}.")
    if (workers := OmegaConf.select(_root_, "cluster.num_workers")) is None:
        alone = str(OmegaConf.select(_root_, "engine")) in ("inline", "Engine.inline")
        workers = 1 if alone else default_num_workers(OmegaConf.select(_root_, "cluster.address"))
    tp = OmegaConf.select(_root_, "sharding.tp")
    return int(count) * max(1, workers // max(1, tp))  # sizes that do not divide are rejected later


def typed_config(cfg: DictConfig, composed: Mapping[str, Any] | None = None) -> SweepConfig:
    """Return a composed config as a sweep's. `nightly` is not part of it: no trial depends on it.

    Args and errors as of `nightly_config`.
    """
    return part(nightly_config(cfg, composed), SweepConfig)


def nightly_config(cfg: DictConfig, composed: Mapping[str, Any] | None = None) -> NightlyConfig:
    """Return the dataclasses behind a composed config, and set its `data.vocab_size` if the model has that.

    Args:
        composed: the same as plain values, to save time; None: not known yet.

    Raises:
        ConfigError: a key that no dataclass has: `+key=value` gets it past Hydra; or credentials in an address.
    """
    _fill_vocab_size(cfg)
    opens = {group: group in ("model", "data") or cfg[group].get("_target_") for group in OPEN_GROUPS}
    own = leaves({key: value for key, value in (composed or plain(cfg)).items() if key != "hydra"})
    if unknown := [key for key in own if key not in _KEYS and not opens.get(key.partition(".")[0])]:
        raise ConfigError(f"{unknown[0]} is not a key. {valid_keys(unknown[0])}")
    opened = {
        group: kind.of_keys(OmegaConf.to_container(cfg[group], resolve=True), f"{group}.")  # type: ignore[arg-type, attr-defined]
        for group, kind in zip(OPEN_GROUPS, (ModelConfig, DataConfig, OptimizerConfig, LrScheduleConfig), strict=True)
    }
    values = {f.name: cfg[f.name] for f in fields(NightlyConfig) if f.name not in opened}
    values = {name: OmegaConf.to_object(v) if OmegaConf.is_config(v) else v for name, v in values.items()}
    objective = from_dict(SweepConfig, {"objective": values["objective"]}).objective
    typed = NightlyConfig(**{**values, **opened, "objective": objective})
    for key, value in flatten(typed).items():
        check_credentials(key, str(value))
    return typed


def _fill_vocab_size(own: DictConfig) -> None:
    """Set `data.vocab_size=${model.vocab_size}` from the model's configuration, unless that key is typed."""
    wanted = OmegaConf.to_container(own.data)
    if wanted.get("vocab_size") != "${model.vocab_size}" or "vocab_size" in own.model:  # type: ignore[union-attr]
        return
    values: dict[str, Any] = OmegaConf.to_container(own.model, resolve=True)  # type: ignore[assignment]
    own.data.vocab_size = known_vocab_size(values)
    if own.data.vocab_size is None and not ModelConfig.of_keys(values, "model.").sizes():
        raise ConfigError(
            f"model._target_={values['_target_']} has no key model.vocab_size, from which data.vocab_size is taken; "
            "set data.vocab_size=<number>, as in data.vocab_size=32000."
        )


def with_variables(saved: SweepConfig) -> SweepConfig:
    """Return a saved config, with set environment variables resolved in arguments of model, data and optimizer."""
    content = to_dict(saved)
    if not (named := variables_in(content)):
        return saved
    known = OmegaConf.create(content)  # an argument may name other keys
    for key in named:
        with suppress(OmegaConfBaseException):
            with_typed(content, {key: OmegaConf.select(known, key)})
    return from_dict(SweepConfig, content)


def group_choices(cfg: DictConfig) -> dict[str, str]:
    """Return the chosen options, such as `{"sharding": "per_block", ...}`, without Hydra's own groups."""
    choices: dict[str, Any] = OmegaConf.to_container(cfg.hydra.runtime.choices)  # type: ignore[assignment]
    return {group: str(option) for group, option in choices.items() if not group.startswith("hydra/") and option}


def single_trial(cfg: DictConfig) -> Trial:
    hydra = HydraConfig.get()
    check_hydra(hydra)
    with open_dict(cfg):
        cfg.hydra = hydra
    # the overrides as typed: a variable in them may be a secret
    return _trial(cfg, None, plain(cfg)["hydra"]["overrides"]["task"], Path(hydra.runtime.output_dir))


def cell_trial(cfg: DictConfig, overrides: Sequence[str], number: int, sweep_folder: Path) -> Trial:
    """Return the trial of a grid's cell, or of a search's suggestion.

    Args:
        cfg: composed by Hydra, with its own part.
        number: of the trial in its sweep.
    """
    with open_dict(cfg):
        cfg.hydra.job.id = f"{cfg.hydra.job.name}_{number}"
        cfg.hydra.job.num = number
    HydraConfig.instance().cfg = cfg  # type: ignore[assignment]  # which `${hydra:...}` reads
    return _trial(cfg, number, overrides, sweep_folder / str(cfg.hydra.sweep.subdir))


def _trial(cfg: DictConfig, number: int | None, overrides: Sequence[str], folder: Path) -> Trial:
    choices, composed = group_choices(cfg), plain(cfg)
    return Trial(number, typed_config(cfg, composed), choices, list(overrides), folder, composed)


def plain(cfg: DictConfig) -> dict[str, Any]:
    """Return a composed config as plain values, with interpolations as written."""
    values: dict[str, Any] = OmegaConf.to_container(cfg, resolve=False, enum_to_str=True)  # type: ignore[assignment]
    return values
