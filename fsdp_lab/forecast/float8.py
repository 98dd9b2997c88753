"""Linear layers for fake tensors that hold and compute the same as torchao's float8 layers on a GPU.

The recipe is that of `training.float8`. A layer has three products, and each operand is scaled by rows and cast when it
is needed. The backward pass casts the bfloat16 operands again. Gathers send bfloat16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fsdp_lab.forecast.torch_private import float8_product
from fsdp_lab.training.blocks import BlockClasses
from fsdp_lab.training.float8 import layers_to_convert

_FLOAT8 = torch.float8_e4m3fn


def apply_fake_float8(model: nn.Module, block_classes: BlockClasses, device: torch.device) -> None:
    """Replace the layers that `training.float8.apply_float8` replaces, in place, whatever the device.

    Raises:
        UserError: no layer can be replaced.
    """
    for layer in layers_to_convert(model, block_classes):
        layer.__class__ = _FakeFloat8Linear


class _FakeFloat8Linear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        if torch.is_autocast_enabled(input.device.type):
            input = input.to(torch.get_autocast_dtype(input.device.type))
        output = _Products.apply(input, self.weight.t())
        return output if self.bias is None else output + self.bias.to(output.dtype)


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight_t: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(input, weight_t)
        scaled, weight = _cast(input, -1), _cast(weight_t, 0)
        return _product(scaled[0].flatten(0, -2), scaled[1].flatten(0, -2), *weight, input.dtype).unflatten(
            0, input.shape[:-1]
        )

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        input, weight_t = ctx.saved_tensors
        rows, inputs = grad.flatten(0, -2), input.flatten(0, -2)
        weight, weight_scale = _cast(weight_t, -1)
        grad_input = _product(*_cast(rows, -1), weight.t(), weight_scale.t(), grad.dtype).unflatten(0, input.shape[:-1])
        columns, columns_scale = _cast(rows, 0)
        grad_weight = _product(columns.t(), columns_scale.t(), *_cast(inputs, 0), grad.dtype)
        return grad_input, grad_weight.t()


def _cast(tensor: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return a tensor in float8, and its scales along a dimension."""
    largest = torch.finfo(_FLOAT8).max
    highest = torch.amax(torch.abs(tensor), dim=dim, keepdim=True).to(torch.float64)
    scale = (largest / torch.clamp(highest, min=1e-12)).to(torch.float32)
    scaled = (tensor.to(torch.float32) * scale).clamp(min=-largest, max=largest)
    return scaled.to(_FLOAT8), scale


def _product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a product in the layout that GPUs multiply float8 in: rows by columns."""
    a = a if a.stride(-1) == 1 else a.contiguous()
    b = b if b.stride(0) == 1 else b.t().contiguous().t()
    return float8_product(a, b, a_scale.reciprocal(), b_scale.reciprocal(), dtype)
