"""Builders that turn the names in a config into a workload."""

from __future__ import annotations

import importlib
from dataclasses import replace
from functools import partial
from typing import Any

from fsdp_lab.config.options import path_of
from fsdp_lab.config.rules import check_classes, check_vocab_size
from fsdp_lab.config.target import import_callable
from fsdp_lab.config.workload import DataConfig, ModelConfig, TaskConfig, may_lack_labels
from fsdp_lab.workloads.base import Data, DataSpec, Task, Workload
from fsdp_lab.workloads.user.data import build_data
from fsdp_lab.workloads.user.loader import build_loader_data
from fsdp_lab.workloads.user.model import build_model_spec
from fsdp_lab.workloads.user.step import UserStep, in_parts
from fsdp_lab.workloads.user.task import AroundUser


def build_workload(model: ModelConfig, data: DataConfig, task: TaskConfig | None = None) -> Workload:
    """Compose the workload of a config. Reads no data and allocates no parameter.

    Args:
        task: None: classification.

    Raises:
        ConfigError: an unknown name, or a path that cannot be imported.
    """
    task = task or TaskConfig()
    spec, made = build_model_spec(model), build_task(task, model)
    if task.step is not None:
        spec = replace(spec, build=partial(in_parts, spec.build))
    read = build_data(data, model, spec.build) if data.loader is None else build_loader_data(data, model)
    served = with_known_tokens(read, model, data)
    return Workload(spec, served, AroundUser(made, may_lack_labels(task.name, data)), model.flops_per_unit)


def build_task(task: TaskConfig, model: ModelConfig) -> Task:
    """Return the configured task; only its own module is imported."""
    made: Any = importlib.import_module(path_of("task.name", task.name)).build_task(task, model)
    return made if task.step is None else UserStep(import_callable(task.step, "task.step"), task.step, made)


def with_known_tokens(spec: DataSpec, model: ModelConfig, data: DataConfig) -> DataSpec:
    """Return the same data, which check on loading that the model knows all their tokens and classes.

    Without the check a GPU would fail with an assertion in a kernel.
    """

    def load() -> Data:
        loaded = spec.load()
        check_classes(model, data)
        check_vocab_size(model, data, loaded.vocab_size)
        return loaded

    return replace(spec, load=load)
