"""What PyTorch's dispatcher does only on a GPU, for a forecast that runs on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fsdp_lab.forecast.fake import ACCELERATOR, HALVES
from fsdp_lab.forecast.torch_private import FROM_HALF, argument, is_autocast_on_cuda, place_of, scoped_library
from fsdp_lab.workloads.base import map_tensors, tensors_of

# What autocast does only on a GPU, from ATen/autocast_mode.h of PyTorch 2.15; operators that the installed version
# lacks are left out. Computed in float32:
FLOAT32 = (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt"),
    *("sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus"),
    *("layer_norm", "native_layer_norm", "rms_norm", "group_norm", "frobenius_norm.dim"),
    *("nuclear_norm", "nuclear_norm.dim", "cosine_similarity", "dist", "pdist", "renorm", "logsumexp"),
    *("upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_nearest2d", "_upsample_nearest_exact2d"),
    *("upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d"),
    *("_upsample_bilinear2d_aa", "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bicubic2d_aa"),
)
# Computed from tensors as they are, with results in float32:
FLOAT32_RESULTS = (
    *("softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm"),
    *("linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList"),
)
# Computed in autocast's own type, without cells of recurrent layers, which have no CPU kernels:
LOWER = ("addmv", "addr", "einsum", "mv", "chain_matmul", "linalg_multi_dot")
# Computed in the widest type of their tensors:
PROMOTED = (
    *("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "index_put", "tensordot", "scatter_add"),
)
# Cast on a CPU only:
AS_THEY_ARE = (
    *("adaptive_avg_pool3d", "avg_pool3d", "max_pool3d", "cat", "stack", "index_copy", "grid_sampler_2d"),
    *("grid_sampler_3d", "reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d"),
    *("replication_pad3d",),
)


@contextmanager
def dispatched_as_on_cuda() -> Iterator[None]:
    """Make autocast choose the types of a GPU, and dropout one kernel with a mask of one byte per element.

    Inside, `torch.autocast("cuda")` in a model's `forward` takes effect, `is_cuda` is true for tensors on the GPU, and
    `to("cuda")` moves them there.
    """
    enter, move = torch.autocast.__init__, Tensor.to

    def init(  # the compiler looks for these names
        self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: bool | None = None
    ) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", torch.get_autocast_dtype("cuda") if dtype is None else dtype
        enter(self, device_type, dtype, enabled, cache_enabled)

    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return move(self, *map(_as_forecast, args), **{name: _as_forecast(value) for name, value in kwargs.items()})

    def cuda(self: Tensor, *_: Any, **__: Any) -> Tensor:
        return move(self, ACCELERATOR)

    with (
        scoped_library("aten", "IMPL", "AutocastCPU") as autocast,
        scoped_library("aten", "IMPL", "AutogradCPU") as autograd,
        mock.patch.object(torch.autocast, "__init__", init),
        mock.patch.object(Tensor, "is_cuda", property(lambda tensor: tensor.device == ACCELERATOR), create=True),
        mock.patch.object(Tensor, "to", to),
        mock.patch.object(Tensor, "cuda", cuda),
    ):
        for names, type_of in ((FLOAT32, _float32), (LOWER, _of_autocast), (PROMOTED, _widest)):
            for name in filter(is_autocast_on_cuda, names):
                autocast.impl(name, _cast(_operator(name), type_of))
        for name in filter(is_autocast_on_cuda, FLOAT32_RESULTS):
            autocast.impl(name, _to_float32(_operator(name), FROM_HALF.get(name)))
        for name in AS_THEY_ARE:
            autocast.impl(name, torch.library.fallthrough_kernel)
        autograd.impl("dropout", _dropout)
        yield


def _as_forecast(value: Any) -> Any:
    """Return the stand-in for the GPU if a model names a GPU; any other value unchanged."""
    is_gpu = isinstance(value, str) and value.partition(":")[0] == "cuda"
    return ACCELERATOR if is_gpu or (isinstance(value, torch.device) and value.type == "cuda") else value


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _float32(_: Sequence[Tensor]) -> torch.dtype:
    return torch.float32


def _of_autocast(_: Sequence[Tensor]) -> torch.dtype:
    return torch.get_autocast_dtype("cpu")


def _widest(tensors: Sequence[Tensor]) -> torch.dtype:
    is_mixed = any(tensor.dtype is torch.float32 for tensor in tensors)
    return torch.float32 if is_mixed else torch.get_autocast_dtype("cpu")


def _cast(operator: Any, type_of: Callable[[Sequence[Tensor]], torch.dtype]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = type_of(tensors_of((args, kwargs)))

        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.dtype in (*HALVES, torch.float32) else tensor

        with torch.autocast("cpu", enabled=False):
            args, kwargs = map_tensors(cast, (args, kwargs))
            return operator(*args, **kwargs)

    return kernel


def _to_float32(operator: Any, from_half: Any) -> Callable[..., Any]:
    at = place_of(operator, "dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            if argument(operator, "dtype", args, kwargs) is not None or args[0].dtype not in HALVES:
                return operator(*args, **kwargs)
            args = args[:at]
            if from_half is not None and args[0].dtype is torch.float16:
                return from_half(*args, True)
            return operator(*args, **{**kwargs, "dtype": torch.float32})

    return kernel


def _dropout(input: Tensor, p: float, train: bool) -> Tensor:
    if not train or not p or not input.numel():
        return input
    if p >= 1:
        return input * torch.zeros((), dtype=input.dtype, device=input.device)
    return torch.native_dropout(input, p, train)[0]
