"""The user's module as the model of a workload."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from fsdp_lab.config.errors import UserError
from fsdp_lab.config.target import import_callable, import_object, in_words, instantiate
from fsdp_lab.config.workload import ModelConfig, ModelSource, needed_target
from fsdp_lab.workloads.base import ModelSpec


def build_model_spec(config: ModelConfig) -> ModelSpec:
    target = needed_target(config.target, "model")
    function = import_callable(target, "model._target_")
    blocks = [import_object(path, "model.block_classes") for path in config.block_classes or ()]
    shown = ", ".join(f"{name}={value}" for name, value in config.arguments.items())
    known = isinstance(function, ModelSource)
    return ModelSpec(
        partial(_call, function, target, config.arguments),
        tuple(blocks) if blocks else None,
        f"{target}({shown})",
        function.load_weights(**config.arguments) if known else None,
        function.save(**config.arguments) if known else None,
    )


def _call(function: Any, target: str, arguments: dict[str, Any]) -> nn.Module:
    try:
        model = function(**instantiate(arguments, "model"))  # anew: it may run again, and may change a list
    except UserError:  # our own say it in one message
        raise
    except (TypeError, ValueError, KeyError, AttributeError, AssertionError, OSError, ImportError) as error:
        shown = ", ".join(f"model.{name}={value}" for name, value in arguments.items()) or "no arguments"
        raise UserError(f"model._target_={target} with {shown} fails: {in_words(error)}") from error
    if not isinstance(model, nn.Module):
        raise UserError(
            f"model._target_={target} returns a {type(model).__name__}; it must return an nn.Module: name the class "
            "of the module, or a function that returns one."
        )
    return model
