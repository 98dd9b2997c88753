"""The attention kernels of a GPU, in a forecast that runs on a CPU.

`F.scaled_dot_product_attention` picks its kernel by the device of its arguments, and the kernels keep different
tensors for the backward pass. A forecast's GPU is a CPU to PyTorch, so the choice is made here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

_HALVES = (torch.float16, torch.bfloat16)
_FLASH_HEAD_DIM = 256  # the largest; it takes multiples of 8


@contextmanager
def cuda_attention() -> Iterator[None]:
    """Let `F.scaled_dot_product_attention` keep what it keeps on an NVIDIA GPU since Ampere (sm80).

    In half precision without a mask that is flash attention, whose output has the layout of the query; cuDNN's, which
    some versions prefer, keeps the same. Otherwise it is memory-efficient attention: its output lies in memory as
    (batch, sequence, heads, head size), so a model that flattens it in another order makes a copy, and keeps both.
    """
    on_cpu = F.scaled_dot_product_attention

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if _is_flash(query, value, attn_mask):
            return torch.ops.aten._scaled_dot_product_flash_attention(
                query, key, value, dropout_p, is_causal, False, scale=scale
            )[0]
        if query.dim() == 4 and query.shape[1] == key.shape[1]:
            keeps = any(tensor.requires_grad for tensor in (query, key, value))
            return torch.ops.aten._scaled_dot_product_efficient_attention(
                query, key, value, attn_mask, keeps, dropout_p, is_causal, scale=scale
            )[0]
        return on_cpu(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    with mock.patch.object(F, "scaled_dot_product_attention", attention):
        yield


def _is_flash(query: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    size = query.shape[-1]
    return (
        query.dtype in _HALVES
        and mask is None
        and query.dim() == 4
        and size == value.shape[-1] <= _FLASH_HEAD_DIM
        and size % 8 == 0
    )
