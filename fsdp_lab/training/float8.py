"""Linear layers that multiply in float8, by torchao: the only module that imports it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fsdp_lab.config.axes.precision import FLOAT8_SINCE
from fsdp_lab.config.errors import ModelError, UserError
from fsdp_lab.training.blocks import BlockClasses

_MULTIPLE = 16  # GPUs multiply in float8 only if both sizes of a weight are multiples of it


def apply_float8(model: nn.Module, block_classes: BlockClasses, device: torch.device, emulate: bool = False) -> None:
    """Replace the plain linear layers of blocks by torchao's float8 ones, scaled by rows, in place.

    The embedding and the head stay as they are, and so do layers with a size that is no multiple of 16.

    Args:
        model: before it is sharded.
        emulate: compute on any device what a GPU would compute in float8.

    Raises:
        UserError: the device has no float8, torchao is missing, or no layer can be replaced.
    """
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if not emulate and (capability is None or capability < FLOAT8_SINCE):
        have = "a CPU" if capability is None else f"{capability[0]}.{capability[1]}"
        raise UserError(
            "precision=float8 needs a GPU of compute capability 8.9 (Ada, Hopper or newer), and this worker has "
            f"{have}; use precision=bf16_mixed."
        )
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise UserError(
            f"precision=float8 needs torchao, which cannot be imported ({error}): "
            "pip install -e '.[float8]' in the clone."
        ) from error

    chosen = {id(layer) for layer in layers_to_convert(model, block_classes)}
    recipe = replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=emulate)
    convert_to_float8_training(model, config=recipe, module_filter_fn=lambda layer, _: id(layer) in chosen)
    for module in model.modules():
        if type(module).__name__ == "Float8Linear":
            module.register_forward_pre_hook(_check_rows)


def _check_rows(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Check what the gradient of a weight adds up over."""
    rows = inputs[0].shape[:-1].numel() if inputs else 0
    if rows % _MULTIPLE and torch.is_grad_enabled() and layer.weight.requires_grad:
        raise ModelError(
            f"precision=float8: a linear layer gets {rows} rows (tokens) of a microbatch, and GPUs multiply multiples "
            f"of {_MULTIPLE} in float8; choose training.global_batch_size, training.grad_accum_steps and the length of "
            "samples so that it is one, or use precision=bf16_mixed."
        )


def layers_to_convert(model: nn.Module, block_classes: BlockClasses) -> list[nn.Module]:
    """Return the linear layers that compute in float8.

    Raises:
        UserError: there is none.
    """
    blocks = [module for module in model.modules() if isinstance(module, block_classes)]
    chosen = {id(layer): layer for block in blocks for layer in block.modules() if _is_converted(layer)}
    if not chosen:
        raise ModelError(
            "precision=float8 has nothing to convert: no block has an nn.Linear whose two sizes are multiples of 16; "
            "use precision=bf16_mixed."
        )
    return list(chosen.values())


def _is_converted(layer: nn.Module) -> bool:
    """Return whether a layer is a plain linear one of suitable sizes; subclasses have a forward pass of their own."""
    return type(layer) is nn.Linear and not layer.in_features % _MULTIPLE and not layer.out_features % _MULTIPLE
