"""GPU kernels that keep other tensors for the backward pass than CPU kernels do, in a forecast that runs on a CPU.

PyTorch picks a kernel by the device of its arguments, which in a forecast is a CPU. So this module picks the kernels of
an NVIDIA GPU since Ampere (sm80).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends import cuda as backends
from torch.distributed.tensor import DTensor, Partial

from fsdp_lab.forecast.dispatch import HALVES, dispatched_as_on_cuda
from fsdp_lab.forecast.fake import ACCELERATOR
from fsdp_lab.forecast.speed.device import Device
from fsdp_lab.forecast.torch_private import (
    OnKernel,
    efficient_attention,
    flash_attention,
    flash_attention_backward,
    is_autocast_on_cuda,
    plain_attention,
)
from fsdp_lab.memory.torch_private import TorchDispatchMode

_AGGREGATES_IN = torch.float32  # of GPU kernels with input in half precision
_FLASH_SEED = 6  # which of the results of flash attention
_LAYER_NORM = torch.ops.aten.native_layer_norm.default
_SUM = torch.ops.aten.sum.dim_IntList
_FLASH_HEAD_DIM = 256  # the largest
_FLASH_ALIGNMENT = 8  # of the head size; others are padded
_CORES = 132  # streaming multiprocessors of an H100, for a GPU without a data sheet
_EFFICIENT_ALIGNMENT = 4  # of the head size in float32; others take the plain path


@contextmanager
def cuda_kernels(sheet: Device | None = None, on_kernel: OnKernel = lambda name, reads, writes: None) -> Iterator[None]:
    """Make operators keep the tensors that they keep on a GPU, and make `"cuda"` the GPU of the forecast.

    Args:
        sheet: of the GPU; None: an H100.
        on_kernel: called with the name, the inputs and the outputs of a kernel that does not run here.
    """
    rms_norm = F.rms_norm

    def fused_rms_norm(
        input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        if torch.is_autocast_enabled("cpu") and is_autocast_on_cuda("rms_norm") and not torch.compiler.is_compiling():
            input, weight = input.float(), None if weight is None else weight.float()
        # the fused kernel requires one type, and the compiler generates its own
        if torch.compiler.is_compiling() or (weight is not None and weight.dtype is not input.dtype):
            return rms_norm(input, list(normalized_shape), weight, eps)
        if not isinstance(input, DTensor):
            return _FusedRmsNorm.apply(input, len(normalized_shape), weight, on_kernel)
        mesh, placements = input.device_mesh, input.placements  # a part of the sequence
        part = weight.to_local(grad_placements=[Partial()]) if isinstance(weight, DTensor) else weight
        output = _FusedRmsNorm.apply(input.to_local(), len(normalized_shape), part, on_kernel)
        return DTensor.from_local(output, mesh, placements, run_check=False)

    with ExitStack() as patched:
        for original, ours in ((F.scaled_dot_product_attention, _attention), (rms_norm, fused_rms_norm)):
            for module, name in _names_of(original):
                patched.enter_context(mock.patch.object(module, name, ours))
        patched.enter_context(dispatched_as_on_cuda())
        patched.enter_context(_ResultsOfGpu(sheet is None or sheet.reached.cudnn_attention is not None))
        yield


def _names_of(function: Any) -> list[tuple[ModuleType, str]]:
    """Return the modules that hold a PyTorch function, and its name there; `from ... import` adds more of them."""
    modules = [m for m in list(sys.modules.values()) if isinstance(m, ModuleType)]
    outside = [m for m in modules if m is F or m.__name__.partition(".")[0] != "torch"]
    return [(m, name) for m in outside for name, value in list(vars(m).items()) if value is function]


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

    A kernel that `torch.nn.attention.sdpa_kernel` excludes is skipped.

    - Flash attention: half precision without a mask, with an output in the layout of the query. cuDNN's attention,
      which some versions prefer, keeps the same tensors.
    - Memory-efficient attention: the memory layout of its output is (batch, sequence, heads, head size). A model that
      flattens it in another order makes a copy, and keeps both.
    - The plain path, which keeps the scores.
    """
    size = query.shape[-1]
    if attn_mask is not None and attn_mask.dtype is torch.bool:  # a GPU's kernels add a mask of numbers
        numbers = torch.zeros_like(attn_mask, dtype=query.dtype)
        attn_mask = numbers.masked_fill_(attn_mask.logical_not(), float("-inf"))
    whole = query.dim() == 4 and size == value.shape[-1]
    fused, efficient = _allowed()
    if fused and whole and attn_mask is None and query.dtype in HALVES and size <= _FLASH_HEAD_DIM:
        scale = size**-0.5 if scale is None else scale
        pad = -size % _FLASH_ALIGNMENT
        padded = [F.pad(tensor, (0, pad)) if pad else tensor for tensor in (query, key, value)]
        out = flash_attention(*padded, dropout_p, is_causal, False, scale=scale)[0]
        return out[..., :size] if pad else out
    aligned = size % (_FLASH_ALIGNMENT if query.dtype in HALVES else _EFFICIENT_ALIGNMENT) == 0
    if efficient and whole and aligned and query.shape[1] == key.shape[1]:
        keeps = any(tensor.requires_grad for tensor in (query, key, value))
        return efficient_attention(query, key, value, attn_mask, keeps, dropout_p, is_causal, scale=scale)[0]
    return plain_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]


@torch.compiler.assume_constant_result
def _allowed() -> tuple[bool, bool]:
    """Return two flags: flash or cuDNN attention is allowed, and memory-efficient attention is allowed."""
    return backends.flash_sdp_enabled() or backends.cudnn_sdp_enabled(), backends.mem_efficient_sdp_enabled()


class _FusedRmsNorm(torch.autograd.Function):
    """The tensors of the CUDA kernel, which keeps the input, the weight and one number per row."""

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


class _ResultsOfGpu(TorchDispatchMode):
    """Corrects results with another type or size on a GPU than on a CPU, in a step that is not compiled.

    Args:
        cudnn_attention: PyTorch prefers cuDNN's attention to FlashAttention, as it does since Hopper.
    """

    def __init__(self, cudnn_attention: bool) -> None:
        super().__init__()
        self._cudnn_attention = cudnn_attention

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = dict(kwargs or {})
        if getattr(kwargs.get("device"), "type", None) == "cuda":  # a model that names its device
            kwargs["device"] = ACCELERATOR
        results = func(*args, **kwargs)
        if self.ignore_compile_internals():  # compiled code checks what it gets
            return results
        if func is _LAYER_NORM and results[0].dtype in HALVES:
            return (results[0], *(statistic.to(_AGGREGATES_IN) for statistic in results[1:]))
        if func is flash_attention.default and self._cudnn_attention:
            seed = torch.empty((), dtype=torch.int64, device=results[0].device)
            return (*results[:_FLASH_SEED], seed, *results[_FLASH_SEED + 1 :])
        return results


def buffer_bytes(sheet: Device | None, func: Any, args: Sequence[Any]) -> int:
    """Return the bytes of the buffer that an operator's kernel allocates while it runs; 0 if it needs none.

    For attention it is cuDNN's. `tests/forecast/attention_buffers.csv` has the buffers on an H200, with PyTorch 2.11
    and cuDNN 9.19. FlashAttention-2 allocates as much, up to rounding. Buffers of convolutions are not known.
    """
    if func is flash_attention_backward.default:
        query, key = args[1], args[2]
        elements = query.numel()
        rows = elements // query.shape[-1]
        shared = 2 * query.element_size() * elements if key.shape[1] != query.shape[1] else 0
        return 4 * (elements + rows) + 256 + shared
    if func is _SUM and args[0].device == ACCELERATOR:
        return _column_sum_bytes(sheet.num_cores if sheet else _CORES, args[0], args[1])
    return 0


def _column_sum_bytes(num_cores: int, matrix: Tensor, dims: Sequence[int]) -> int:
    """Return the bytes for the partial sums of thread blocks in a sum of rows, such as the gradient of a bias.

    PyTorch divides it into at most 512 threads per block, four columns per thread, and 2,048 threads per
    multiprocessor, or fewer on graphics GPUs (`setReduceConfig` in ATen/native/cuda/Reduce.cuh). Only for row-major
    matrices.
    """
    columns = matrix.shape[-1]
    if not matrix.is_contiguous() or list(dims) != list(range(matrix.dim() - 1)) or columns % 4 or columns < 4:
        return 0
    rows, vectors, threads = matrix.numel() // columns, columns // 4, 512 // 4
    width, height = min(_power(vectors, threads), 32), _power(rows, threads)
    height = min(height, threads // width)
    width = min(_power(vectors, threads), threads // height)
    if rows < min(height * 16, 256):
        return 0  # one warp sums its columns
    each, blocks = -(-rows // height), -(-vectors // width)
    wanted = num_cores * (2048 // (width * height))
    if each < 256 or blocks > wanted:
        return 0  # one block sums them
    parts = max(min(-(-wanted // blocks), -(-each // 16)), -(-each // 256))
    return 4 * columns * parts * width * 4 + 4 * blocks if parts > 1 else 0  # plus a counter per block


def _power(number: int, most: int) -> int:
    return 1 << (number.bit_length() - 1) if number < most else most
