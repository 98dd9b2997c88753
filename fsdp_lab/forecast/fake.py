"""A world without memory or peers: tensors that have only shapes, and a process group with one real rank."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_lab.forecast.torch_private import (
    FLOAT8_PRODUCT,
    ITEM,
    STEP_IF_FINITE,
    FakeTensorMode,
    peers_not_asked,
)
from fsdp_lab.memory.torch_private import (
    DEVICE,
    TorchDispatchMode,
    active_fake_mode,
    without_modes,
)
from fsdp_lab.training.distributed import DistributedContext, leave_process_group
from fsdp_lab.workloads.base import map_tensors, tensors_of

HOST = torch.device("cpu")
HALVES = (torch.float16, torch.bfloat16)
# Stands for a GPU where host and device must differ. A fake tensor may be on a second CPU, which does not exist. For a
# fake CUDA device the autograd engine would need a real context.
ACCELERATOR = torch.device("cpu", 1)


@contextmanager
def fake_world(world_size: int, device: torch.device, rank: int = 0) -> Iterator[DistributedContext]:
    """Make this process one rank of a process group whose other ranks do not exist.

    Nothing is sent: a collective leaves its output unchanged.

    Args:
        rank: of this process; the first rank holds the largest shard of every parameter.
    """
    assert not dist.is_initialized(), "a forecast needs a process without a process group"
    hook = sys.excepthook
    dist.init_process_group("fake", rank=rank, world_size=world_size)
    try:
        with peers_not_asked(device), mock.patch.object(dist, "all_reduce", _all_reduce):
            yield DistributedContext(rank=rank, local_rank=rank, world_size=world_size, device=device)
    finally:
        leave_process_group()
        sys.excepthook = hook  # a process group puts its own around it, each time


def _all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return the fake work of a reduction for DDP's hooks, which use its result.

    It does not hold tensors that a hook compressed, as in a measured step.
    """
    if tensor.dtype is not torch.float32:
        with without_modes():
            tensor = tensor.clone()
    future = torch.futures.Future[list[Tensor]]()
    future.set_result([tensor])
    # without a cycle the tensor is freed at once
    return SimpleNamespace(wait=lambda *_: True, is_completed=lambda: True, get_future=lambda: future)


# On all devices, these kernels compute every element in the tensor that becomes the mean or sum, and keep its storage.
# PyTorch's own fake results have storage for one element.
_MADE_WHOLE = {
    getattr(torch.ops.aten, name).default
    for name in ("mse_loss", "smooth_l1_loss", "soft_margin_loss", "binary_cross_entropy")
}


def _with_whole_storage(result: Tensor, first: Tensor, second: Tensor) -> Tensor:
    whole = torch.empty(torch.broadcast_shapes(first.shape, second.shape), dtype=result.dtype, device=result.device)
    return whole.as_strided(result.shape, result.stride())


# Kernels that refuse tensors of several types, which PyTorch's fake results do not: the arguments that must agree.
_ONE_TYPE = {
    getattr(torch.ops.aten, name).default: places
    for name, places in {
        **dict.fromkeys(("mm", "mv", "_cdist_forward", "binary_cross_entropy"), (0, 1)),
        **dict.fromkeys(("addmm", "addmv", "convolution"), (0, 1, 2)),
        **dict.fromkeys(("index_put", "index_put_", "_unsafe_index_put", "nll_loss_forward"), (0, 2)),
        **dict.fromkeys(("index_add", "index_add_"), (0, 3)),
        **dict.fromkeys(("_embedding_bag", "_embedding_bag_forward_only"), (0, 6)),
    }.items()
}
# Norms accept weights that are wider than their input, and no narrower ones.
_NORMS = {
    getattr(torch.ops.aten, name).default: places
    for name, places in {
        "native_layer_norm": (0, 2, 3),
        **dict.fromkeys(("native_group_norm", "native_batch_norm", "_native_batch_norm_legit"), (0, 1, 2)),
    }.items()
}


def _check_types(func: Any, args: tuple[Any, ...]) -> None:
    """Raise what a real kernel raises for tensors of several types.

    Raises:
        RuntimeError: the types differ.
    """
    places = _ONE_TYPE.get(func) or _NORMS.get(func)
    if places is None:
        return
    types = [args[place].dtype for place in places if place < len(args) and args[place] is not None]
    if len(set(types)) == 1 or (func in _NORMS and types[0] in HALVES):
        return
    names = " and ".join(str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(types))
    raise RuntimeError(f"tensors of {func.overloadpacket} must have the same dtype, but got {names}")


_PUT_MEMORY = torch.ops.aten.set_.source_Storage_storage_offset
_RNN = torch.ops.aten.mkldnn_rnn_layer.default
_RNN_WORKSPACE = 3  # which of its results
_sizes: dict[str, int] = {}


def _with_workspace(results: tuple[Tensor, ...], args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Add the memory that oneDNN keeps for the backward pass of an LSTM layer.

    PyTorch's fake layer has none, and oneDNN does not publish the size, so this runs a real layer of this shape.
    """
    key = str(map_tensors(lambda tensor: tuple(tensor.shape), list(args)))
    if key not in _sizes:
        with without_modes(), torch.enable_grad():  # without gradients none is kept
            real = map_tensors(lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype), list(args))
            _sizes[key] = _RNN(*real)[_RNN_WORKSPACE].numel()
    workspace = torch.empty(_sizes[key], dtype=results[_RNN_WORKSPACE].dtype, device=results[0].device)
    return (*results[:_RNN_WORKSPACE], workspace, *results[_RNN_WORKSPACE + 1 :])


class ValuesOnRequest(TorchDispatchMode):
    """Returns a value if the training step, not the model, reads a fake tensor: a loss scale, a step count.

    It returns none in a model's forward pass or for other values of an optimizer, because the computation may depend on
    them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.in_model = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is DEVICE:
            return args[0].device
        if func is ITEM and not self.in_model and type(args[0]) is not torch.Tensor:
            name, asks = _asking()
            # 1 is a step count and a loss scale that can be divided by; 0 is "no gradient was infinite"
            if not isinstance(asks, torch.optim.Optimizer) or _is_step_count(args[0], asks):
                return 0.0 if name == STEP_IF_FINITE else 1.0
        if func is _PUT_MEMORY:  # PyTorch would cache the result, which keeps its memory
            with mock.patch.object(active_fake_mode(), "cache_enabled", False):
                return func(*args, **(kwargs or {}))
        if func is FLOAT8_PRODUCT:  # it has no fake result; PyTorch would multiply zeros
            return (kwargs or {})["out"]
        _check_types(func, args)
        if func in _MADE_WHOLE:
            return _with_whole_storage(func(*args, **(kwargs or {})), *args[:2])
        if func is _RNN and args[0].device == HOST and torch.is_grad_enabled():
            return _with_workspace(func(*args, **(kwargs or {})), args)
        if not self.in_model and self._is_bookkeeping(func, args, kwargs or {}):
            with without_modes():
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _is_bookkeeping(func, args, kwargs) -> bool:  # type: ignore[no-untyped-def]
        """Return whether this is DDP's exchange of small integer tensors, which it reads itself.

        They hold the order of its buckets, and the parameters that got a gradient.
        """
        if func in (torch.ops.aten.empty.memory_format, torch.ops.aten.zeros.default):
            return kwargs.get("dtype") is torch.int32
        tensors = tensors_of((args, kwargs))
        return bool(tensors) and all(type(t) is torch.Tensor and t.dtype is torch.int32 for t in tensors)


def _is_step_count(tensor: Tensor, optimizer: torch.optim.Optimizer) -> bool:
    return any(state.get("step") is tensor for state in optimizer.state.values())


def _asking() -> tuple[str, Any]:
    """Return the method of a loss scaler or an optimizer that reads a value, and its object.

    It is the innermost function with such a name.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name not in (STEP_IF_FINITE, "step", "get_scale"):
        frame = frame.f_back
    return (frame.f_code.co_name, frame.f_locals.get("self")) if frame else ("", None)


@contextmanager
def fake_tensors() -> Iterator[ValuesOnRequest]:
    """Make every tensor inside fake: with a shape, a type and a device, but no memory."""
    values = ValuesOnRequest()
    with FakeTensorMode(allow_non_fake_inputs=True), values:
        yield values
