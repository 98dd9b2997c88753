"""The registry: the models and data sets that a config can name, and the module that defines each.

Names and module paths only: nothing is imported here, so that a misspelled name is refused without PyTorch.
"""

from __future__ import annotations

from fsdp_lab.config.errors import ConfigError

# `model.family` -> a module with `build_model(ModelConfig) -> ModelSpec`
MODELS = {
    "vit": "fsdp_lab.workloads.vision.vit",
    "mlp": "fsdp_lab.workloads.vision.mlp",
}
# `data.name` -> a module with `build_source(DataConfig, ModelConfig) -> ImageSource`
DATA_SETS = {
    "digits": "fsdp_lab.workloads.vision.digits",
    "fashion_mnist": "fsdp_lab.workloads.vision.fashion_mnist",
    "synthetic": "fsdp_lab.workloads.vision.synthetic",
}


def register_model(family: str, module: str) -> None:
    """Let `model.family` name a model of another package, in this process."""
    MODELS[family] = module


def register_data_set(name: str, module: str) -> None:
    """Let `data.name` name a data set of another package, in this process."""
    DATA_SETS[name] = module


def module_of(key: str, name: str) -> str:
    """Return the path of the module that `model.family` or `data.name` stands for.

    Raises:
        ConfigError: with the names that are known.
    """
    known = {"model.family": MODELS, "data.name": DATA_SETS}[key]
    if name not in known:
        raise ConfigError(f"{key}={name} is not an option. Choose one of: {', '.join(known)}.")
    return known[name]
