"""Which keys of a config count in which comparison, read from the metadata of its fields."""

from __future__ import annotations

from typing import Any

from fsdp_lab.config.convert import flatten, part
from fsdp_lab.config.key import Between, Memory, keys_of
from fsdp_lab.config.training import ActivationCheckpointing
from fsdp_lab.config.trial import TrialConfig


def settings(config: TrialConfig, between: Between) -> dict[str, Any]:
    """Return the keys that count in a comparison, with their values."""
    keys = keys_of(config)
    return {name: value for name, value in flatten(config).items() if between not in keys[name].may_differ}


def effective_settings(config: TrialConfig, num_workers: int) -> dict[str, Any]:
    """Return the settings that distinguish a trial within its sweep: two trials with equal values train identically.

    Args:
        num_workers: the number of ranks that `cluster.num_workers` stands for.
    """
    return settings(config, Between.CELLS) | _effective(config, num_workers)


def memory_settings(config: TrialConfig, num_workers: int) -> dict[str, Any]:
    """Return the settings that change the memory of an optimizer step: trials with equal values share one forecast.

    Args:
        num_workers: the number of ranks that `cluster.num_workers` stands for.
    """
    keys = keys_of(config)
    counting = {name: value for name, value in flatten(config).items() if keys[name].memory is not None}
    values = {n: bool(v) if keys[n].memory is Memory.WHETHER else v for n, v in counting.items()}
    return values | _effective(config, num_workers)


def speed_settings(config: TrialConfig) -> dict[str, Any]:
    """Return the settings that may change a step's operators, beside those of `memory_settings`."""
    trial = part(config, TrialConfig)
    keys = keys_of(trial)  # with those of a model or data set of the user's
    return {
        name: value for name, value in flatten(trial).items() if keys[name].memory is None and keys[name].changes_speed
    }


def may_change_speed(axis: str) -> bool:
    """Return whether other values of an axis may change the speed or the peak memory of a step.

    Args:
        axis: a key, or a group of keys; True for an unknown name.
    """
    below = [k.changes_speed for name, k in keys_of(TrialConfig).items() if name == axis or name.startswith(f"{axis}.")]
    return any(below) or not below


def _effective(config: TrialConfig, num_workers: int) -> dict[str, Any]:
    """Return the values of those keys that the settings of others and the workers decide."""
    policy, size = config.reshard_after_forward.effective(config.sharding, num_workers)
    return {
        "reshard_after_forward.policy": policy,
        "reshard_after_forward.size": size,
        **_effective_checkpointing(config),
        "cluster.num_workers": num_workers,
    }


def _effective_checkpointing(config: TrialConfig) -> dict[str, Any]:
    """Return the mode and its n, which counts for `every_n` alone; every block is `full`."""
    mode, every = config.activation_checkpointing, config.activation_checkpointing_every
    if mode is ActivationCheckpointing.every_n and every == 1:
        mode = ActivationCheckpointing.full
    counts = mode is ActivationCheckpointing.every_n
    return {"activation_checkpointing": mode.name, "activation_checkpointing_every": every if counts else None}
