"""What PyTorch's dispatcher does on a GPU and not on a CPU, in a forecast that runs on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fsdp_lab.forecast.fake import ACCELERATOR
from fsdp_lab.forecast.torch_private import FROM_HALF, scoped_library
from fsdp_lab.workloads.base import map_tensors

# What autocast computes in float32 on a GPU and not on a CPU (ATen/autocast_mode.h): of these with tensors that were
# cast, and of these with results in float32, from tensors as they are.
FLOAT32 = (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt"),
    *("sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus"),
    *("layer_norm", "native_layer_norm", "rms_norm", "group_norm", "frobenius_norm.dim"),
    *("nuclear_norm", "nuclear_norm.dim", "cosine_similarity", "dist", "pdist", "renorm", "logsumexp"),
    *("upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_nearest2d", "_upsample_nearest_exact2d"),
    *("upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d"),
    *("_upsample_bilinear2d_aa", "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bicubic2d_aa"),
)
FLOAT32_RESULTS = (
    *("softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm"),
    *("linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList"),
)
_HALVES = (torch.float16, torch.bfloat16)


@contextmanager
def dispatched_as_on_cuda() -> Iterator[None]:
    """Let autocast choose the types of a GPU, and dropout be one kernel with a mask of one byte an element.

    A model's own `torch.autocast("cuda")` has its effect inside, and `is_cuda` is true of what is on the GPU.
    """
    enter = torch.autocast.__init__

    def init(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", torch.get_autocast_dtype("cuda") if dtype is None else dtype
        enter(self, device_type, dtype, *args, **kwargs)

    with (
        scoped_library("aten", "IMPL", "AutocastCPU") as autocast,
        scoped_library("aten", "IMPL", "AutogradCPU") as autograd,
        mock.patch.object(torch.autocast, "__init__", init),
        mock.patch.object(Tensor, "is_cuda", property(lambda tensor: tensor.device == ACCELERATOR), create=True),
    ):
        for name in FLOAT32:
            autocast.impl(name, _in_float32(_operator(name)))
        for name in FLOAT32_RESULTS:
            autocast.impl(name, _to_float32(_operator(name), FROM_HALF.get(name)))
        autograd.impl("dropout", _dropout)
        yield


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _in_float32(operator: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            args, kwargs = map_tensors(_cast, (args, kwargs))
            return operator(*args, **kwargs)

    return kernel


def _to_float32(operator: Any, from_half: Any) -> Callable[..., Any]:
    def kernel(input: Tensor, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            if dtype is not None or input.dtype not in _HALVES:
                return operator(input, *args, dtype=dtype, **kwargs)
            if from_half is not None and input.dtype is torch.float16:
                return from_half(input, *args, half_to_float=True)
            return operator(input, *args, dtype=torch.float32, **kwargs)

    return kernel


def _cast(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _HALVES else tensor


def _dropout(input: Tensor, p: float, train: bool) -> Tensor:
    if not train or not p or not input.numel():
        return input
    return torch.native_dropout(input, p, train)[0]
