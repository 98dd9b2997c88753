"""Which keys count when two configs are compared: all but those that the comparison's list names."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from typing import Any

from fsdp_lab.config.axes import AXES, effective
from fsdp_lab.config.axes.precision import PrecisionConfig
from fsdp_lab.config.ranks import Ranks
from fsdp_lab.config.serialize import flatten, part
from fsdp_lab.config.trial import TrialConfig

# In each list a group stands for all its keys.
_RESUMES = ("dry_run", "resume", "resume_failed", "resume_anyway")
_NOWHERE = (*_RESUMES, "trial_timeout_s", "report", "nightly", "check")
# Two cells of a grid, or two suggestions of a search: equal ones are one trial.
CELLS = (*_NOWHERE, "forecast", "engine", "search", "scheduler", "repeats", "objective")
# The first start of a sweep, and the start that resumes it.
STARTS = (
    *(*_NOWHERE, "search.num_trials", "cluster.address", "cluster.max_failures", "cluster.wait_timeout_s"),
    *("tracking.patience_s", "tracking.ui"),
)
_LENGTH = ("training.epochs", "training.max_steps", "training.timing_warmup_steps")
_RECORDS = ("checkpoint", "export", "profile_trace", "memory_profile", "data.loader_workers", "data.val_batch_size")
_DESCRIBES = ("model.flops_per_unit", "data.example_batch")
# A trial that a resume trains, and the trials of the first start that it is compared with.
RESUMED = (*CELLS, "export", "profile_trace", "memory_profile", "tracking", "cluster.storage_path")
# A trial and the checkpoint in its folder that it resumes from.
CHECKPOINT = (*CELLS, *_LENGTH, *_RECORDS, *_DESCRIBES, "cluster", "tracking")
# Two nights of one study, wherever their trials run and are logged.
NIGHTS = (*_NOWHERE, "forecast", "repeat", "repeats", "cluster", "tracking")
# The MLflow parameters of a trial.
PARAMS = (*_RESUMES, "repeats", "report", "nightly", "check")
# The speed and the peak memory of a step.
STEP = (
    *("optimizer.lr", "optimizer.beta1", "optimizer.beta2", "optimizer.scale_lr", "lr_schedule"),
    *("training.seed", "repeat", "init"),
)
# The forecast of a step.
FORECAST = (
    *(*STEP, *_LENGTH, "training.epoch_steps", *_RECORDS, "data.num_train", "data.num_val", "task.metrics"),
    *("precision.init_scale", "precision.growth_interval", "check"),
)
# The keys that a plain loop of the user's code does not have.
LAYOUT = (
    *(key for axis in AXES if axis.is_layout for key in axis.keys),
    *("init", "training.sync_each_microbatch", "optimizer.implementation"),
    *("model.block_classes", "model.forward_methods", "model.tp_plan", "task.loss_chunks"),
)
# A plain loop stores its model in the trial's type, and computes in that type.
_COMPUTES = tuple(f"precision.{one.name}" for one in fields(PrecisionConfig) if one.name != "storage_dtype")
# A trial and the plain loop of its values: the losses of its first steps.
PLAIN = (
    *(*CELLS, *_RECORDS, *LAYOUT, *_COMPUTES, "repeat", "cluster", "tracking"),
    *(*_DESCRIBES, "training.timing_warmup_steps"),
)
# Values that each need their own plain loop in a sweep; of all other keys, the first values suffice.
_KINDS = (
    *("model", "data", "task", "optimizer.name", "optimizer._target_", "optimizer.groups", "lr_schedule._target_"),
    *("training.grad_accum_steps", "batch_parts"),
    "precision.storage_dtype",
)
# A forecast depends only on whether these are set: neither null nor zero.
_WHETHER = ("optimizer.weight_decay", "optimizer.momentum", "training.max_grad_norm")


def counts(key: str, ignored: Collection[str]) -> bool:
    """Return whether a key counts in a comparison that ignores these keys and groups."""
    return not any(key == name or key.startswith(f"{name}.") for name in ignored)


def settings(config: TrialConfig, ignored: Collection[str]) -> dict[str, Any]:
    """Return the keys that count in a comparison, with their values."""
    return {name: value for name, value in flatten(config).items() if counts(name, ignored)}


def effective_settings(config: TrialConfig, num_workers: int) -> dict[str, Any]:
    """Return the settings that distinguish a trial in its sweep: trials with equal values train identically.

    Args:
        num_workers: the number of ranks that `cluster.num_workers` stands for.
    """
    return settings(config, CELLS) | _effective(config, num_workers)


def forecast_settings(config: TrialConfig, num_workers: int) -> dict[str, Any]:
    """Return the settings that may change the operators or the memory of a step; equal ones share a forecast.

    Args:
        num_workers: the number of ranks that `cluster.num_workers` stands for.
    """
    values = settings(part(config, TrialConfig), FORECAST)
    return values | {name: bool(values[name]) for name in _WHETHER if name in values} | _effective(config, num_workers)


def plain_settings(config: TrialConfig, dp_degree: int) -> dict[str, Any]:
    """Return the settings that a trial shares with the plain loop that it is compared with.

    Args:
        dp_degree: the parts of a microbatch.
    """
    return settings(part(config, TrialConfig), PLAIN) | {"batch_parts": dp_degree}


def plain_kind(config: TrialConfig, dp_degree: int) -> dict[str, Any]:
    """Return those of `plain_settings` that need a plain loop per combination."""
    return {name: value for name, value in plain_settings(config, dp_degree).items() if not counts(name, _KINDS)}


def layout_settings(config: TrialConfig) -> dict[str, Any]:
    """Return the settings of a trial's layout."""
    return {name: value for name, value in flatten(part(config, TrialConfig)).items() if not counts(name, LAYOUT)}


def may_change_speed(axis: str) -> bool:
    """Return whether other values of a key, or options of a group, may change the speed or the peak of a step."""
    return counts(axis, STEP)


def _effective(config: TrialConfig, num_workers: int) -> dict[str, Any]:
    ranks = Ranks.of(config.sharding, num_workers)
    return {**effective(config, ranks), "cluster.num_workers": num_workers}
