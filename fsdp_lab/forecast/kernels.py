"""The kernels of a GPU that keep other tensors for the backward pass than a CPU's, in a forecast that runs on a CPU.

PyTorch picks a kernel by the device of its arguments, and a forecast's GPU is a CPU to PyTorch; so the choice of an
NVIDIA GPU since Ampere (sm80) is made here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_lab.training.torch_private import OnKernel, efficient_attention, flash_attention, plain_attention

_HALVES = (torch.float16, torch.bfloat16)
_FLASH_HEAD_DIM = 256  # the largest
_FLASH_ALIGNMENT = 8  # of the head size; others are padded
_EFFICIENT_ALIGNMENT = 4  # of the head size in float32; others take the plain path


@contextmanager
def cuda_kernels(on_kernel: OnKernel = lambda name, reads, writes: None) -> Iterator[None]:
    """Let `F.scaled_dot_product_attention` and `F.rms_norm` keep the tensors that they keep on a GPU.

    Args:
        on_kernel: called with the name, the inputs and the outputs of a kernel that is not called here.
    """
    rms_norm = F.rms_norm

    def fused_rms_norm(
        input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        # the fused kernel takes one type only, and the compiler makes its own
        if torch.compiler.is_compiling() or (weight is not None and weight.dtype is not input.dtype):
            return rms_norm(input, list(normalized_shape), weight, eps)
        return _FusedRmsNorm.apply(input, len(normalized_shape), weight, on_kernel)

    with (
        mock.patch.object(F, "scaled_dot_product_attention", _attention),
        mock.patch.object(F, "rms_norm", fused_rms_norm),
    ):
        yield


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention with the kernel that a GPU would choose.

    - Flash attention: half precision without a mask, with an output in the layout of the query. cuDNN's attention,
      which some versions prefer, keeps the same tensors.
    - Memory-efficient attention: its output lies in memory as (batch, sequence, heads, head size). A model that
      flattens it in another order makes a copy, and keeps both.
    - The plain path, which keeps the scores.
    """
    size = query.shape[-1]
    if attn_mask is not None and attn_mask.dtype is torch.bool:  # a GPU's kernels add a mask of numbers
        numbers = torch.zeros_like(attn_mask, dtype=query.dtype)
        attn_mask = numbers.masked_fill_(attn_mask.logical_not(), float("-inf"))
    whole = query.dim() == 4 and size == value.shape[-1]
    if whole and attn_mask is None and query.dtype in _HALVES and size <= _FLASH_HEAD_DIM:
        scale = size**-0.5 if scale is None else scale
        pad = -size % _FLASH_ALIGNMENT
        padded = [F.pad(tensor, (0, pad)) if pad else tensor for tensor in (query, key, value)]
        out = flash_attention(*padded, dropout_p, is_causal, False, scale=scale)[0]
        return out[..., :size] if pad else out
    aligned = size % (_FLASH_ALIGNMENT if query.dtype in _HALVES else _EFFICIENT_ALIGNMENT) == 0
    if whole and aligned and query.shape[1] == key.shape[1]:
        keeps = any(tensor.requires_grad for tensor in (query, key, value))
        return efficient_attention(query, key, value, attn_mask, keeps, dropout_p, is_causal, scale=scale)[0]
    return plain_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]


class _FusedRmsNorm(torch.autograd.Function):
    """The tensors of the CUDA kernel: it keeps the input, the weight and one number a row, a CPU keeps its steps."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, input: Tensor, num_dims: int, weight: Tensor | None, on_kernel: OnKernel
    ) -> Tensor:
        rows = (*input.shape[:-num_dims], *[1] * num_dims)
        ctx.save_for_backward(input, weight, torch.empty(rows, dtype=torch.float32, device=input.device))
        ctx.on_kernel = on_kernel
        output = torch.empty_like(input)
        on_kernel("rms_norm", [input], [output])
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        input, weight, _ = ctx.saved_tensors
        grads = [torch.empty_like(input), *([] if weight is None else [torch.empty_like(weight)])]
        ctx.on_kernel("rms_norm_backward", [input, grad], grads)
        return grads[0], None, grads[1] if len(grads) > 1 else None, None
