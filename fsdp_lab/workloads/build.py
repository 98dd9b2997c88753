"""Builders that turn the names in a config into a workload."""

from __future__ import annotations

import importlib
from dataclasses import replace

from fsdp_lab.config.parts import check_vocab_size
from fsdp_lab.config.registry import module_of
from fsdp_lab.config.workload import (
    DataConfig,
    DataGroup,
    ModelConfig,
    ModelGroup,
    TaskConfig,
    UserData,
    UserModel,
)
from fsdp_lab.workloads.base import Data, DataSpec, ModelSpec, Task, Workload
from fsdp_lab.workloads.user.data import WithoutPadding, build_data
from fsdp_lab.workloads.user.model import build_model
from fsdp_lab.workloads.user.task import AroundUser, UserLoss
from fsdp_lab.workloads.vision.images import ImageSource, image_data


def build_workload(model: ModelGroup, data: DataGroup, task: TaskConfig | None = None) -> Workload:
    """Compose the workload of a config. Reads no data and allocates no parameter.

    Args:
        model: one of our models or the user's.
        data: one of our data sets or the user's.
        task: None: classification.

    Raises:
        ConfigError: an unknown name, or a path that cannot be imported.
    """
    task = task or TaskConfig()
    spec, made = build_model_spec(model), build_task(task, model)
    served = build_data_spec(data, model, spec)
    if isinstance(data, UserData):
        served = with_known_tokens(served, model, data)
    if isinstance(data, UserData) or isinstance(made, UserLoss):  # of padding these know nothing
        served = without_padding(served)
    if isinstance(model, UserModel) or isinstance(data, UserData) or isinstance(made, UserLoss):
        made = AroundUser(made)
    return Workload(spec, served, made, model.flops_per_unit if isinstance(model, UserModel) else None)


def build_model_spec(model: ModelGroup) -> ModelSpec:
    """Return the spec of the configured model; only the module of its family is imported."""
    if isinstance(model, UserModel):
        return build_model(model)
    assert isinstance(model, ModelConfig)
    spec: ModelSpec = importlib.import_module(module_of("model.family", model.family)).build_model(model)
    return spec


def build_task(task: TaskConfig, model: ModelGroup) -> Task:
    """Return the configured task; only its own module is imported."""
    made: Task = importlib.import_module(module_of("task.name", task.name)).build_task(task, model)
    return made


def build_data_spec(data: DataGroup, model: ModelGroup, spec: ModelSpec) -> DataSpec:
    """Return the configured source of batches.

    Args:
        data: one of our data sets or the user's.
        model: decides the shape of our images.
        spec: of the same model, for `data=example`.
    """
    if isinstance(data, UserData):
        return build_data(data, spec.build)
    assert isinstance(data, DataConfig)
    takes = model if isinstance(model, ModelConfig) else ModelConfig()
    source = build_source(data, takes)
    if not isinstance(model, ModelConfig):  # it takes the images as they are
        channels, size, _ = source.image_shape
        takes = replace(takes, num_channels=channels, image_size=size, num_classes=source.num_classes)
    return image_data(source, data, takes)


def build_source(data: DataConfig, model: ModelConfig) -> ImageSource:
    """Return the configured source of images; only its own module is imported."""
    source: ImageSource = importlib.import_module(module_of("data.name", data.name)).build_source(data, model)
    return source


def with_known_tokens(spec: DataSpec, model: ModelGroup, data: UserData) -> DataSpec:
    """Return the same data, with a check while loading that the model knows all their tokens.

    Without it a GPU would fail with an assertion in a kernel.
    """

    def load() -> Data:
        loaded = spec.load()
        check_vocab_size(model, data, loaded.vocab_size)
        return loaded

    return replace(spec, load=load)


def without_padding(spec: DataSpec) -> DataSpec:
    """Return the same data with a validation split that is served without padding."""

    def load() -> Data:
        data = spec.load()
        return replace(data, val=WithoutPadding(data.val))

    return replace(spec, load=load)
