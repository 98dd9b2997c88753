"""From the names in a config to the workload they stand for."""

from __future__ import annotations

import importlib

from fsdp_lab.config.registry import module_of
from fsdp_lab.config.workload import DataConfig, ModelConfig
from fsdp_lab.workloads.base import ModelSpec, Workload
from fsdp_lab.workloads.vision.classification import Classification
from fsdp_lab.workloads.vision.images import ImageSource, image_data


def build_workload(model: ModelConfig, data: DataConfig) -> Workload:
    """Compose the workload of a config. Reads no data and allocates no parameter.

    Raises:
        ConfigError: an unknown name.
    """
    return Workload(build_model_spec(model), image_data(build_source(data, model), data, model), Classification(model))


def build_model_spec(model: ModelConfig) -> ModelSpec:
    """Return the spec of the configured model; only the module of its family is imported."""
    return importlib.import_module(module_of("model.family", model.family)).build_model(model)


def build_source(data: DataConfig, model: ModelConfig) -> ImageSource:
    """Return the configured source of images; only its own module is imported."""
    return importlib.import_module(module_of("data.name", data.name)).build_source(data, model)
