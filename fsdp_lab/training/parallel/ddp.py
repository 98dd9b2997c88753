"""DDP: each rank has the whole model, and gradients are averaged."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.nn.parallel import DistributedDataParallel

from fsdp_lab.config.axes.precision import Dtype
from fsdp_lab.config.errors import ModelError, UserError
from fsdp_lab.memory.recorder import StepRecorder
from fsdp_lab.memory.torch_private import in_backward
from fsdp_lab.training.parallel.base import Parallel
from fsdp_lab.workloads.base import Workload, map_tensors

# PyTorch has another name for it since 2.15.
_RENAMED = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
_SYNC_BUFFERS: dict[str, Any] = {"forward_sync_buffers" if _RENAMED else "broadcast_buffers": False}

_WAITS = "finished reduction in the prior iteration"
_TWICE = "mark a variable ready only once"


class DDP(Parallel):
    """`DistributedDataParallel` with autocast. It replicates over all ranks and does not use its mesh.

    Gradients are views of the reduction's buckets. A narrower `reduce_dtype` compresses them on the wire.
    """

    model: DistributedDataParallel
    _hook: Callable[..., Any] | None  # reduces a bucket; None: DDP's default

    def leaves_some_unused(self, workload: Workload, on_meta: nn.Module | None = None) -> tuple[bool, list[str]]:
        """Return what a step on `meta` shows, or `sharding.find_unused_parameters`; True if it cannot be computed."""
        if self.config.sharding.find_unused_parameters or self.config.task.step is not None:
            return True, []  # one loss of a step may leave out parts
        try:
            unused = bool(workload.parameters_without_gradient(on_meta))
            why = "some of them get no gradient"
        except Exception as error:  # noqa: BLE001 (whatever a model's forward pass raises where there are no values)
            unused, reason = True, str(error).partition("\n")[0]
            why = f"a step without values fails, so those that it uses are not known ({type(error).__name__}: {reason})"
        looks = "sharding=ddp looks for unused parameters in every step (find_unused_parameters), which costs time"
        return unused, [f"{looks}: {why}"] if unused else []

    def wrap(self, model: nn.Module, find_unused: bool) -> None:
        """Wrap the model; DDP would wait for parameters without a gradient."""
        self.model = DistributedDataParallel(
            model,
            device_ids=[self.device] if self.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            find_unused_parameters=find_unused,
            **_SYNC_BUFFERS,  # FSDP2 does not sync them either, so every sharding computes the same
        )
        precision = self.config.precision
        hooks = {Dtype.bfloat16: bf16_compress_hook, Dtype.float16: fp16_compress_hook}
        self._hook = None if precision.is_narrow else hooks.get(precision.reduce_dtype)
        if self._hook is not None:
            self.model.register_comm_hook(None, self._hook)
        if precision.is_narrow:
            cast = partial(_cast, getattr(torch, precision.storage_dtype.value))
            for root in self.roots(model).values():
                root.register_forward_pre_hook(cast, with_kwargs=True)

    def reduce_in_python(self) -> None:
        """Reduce in Python as DDP does in C++, where a fake group has no result."""
        if self._hook is None:  # else `wrap` has registered one
            self.model.register_comm_hook(None, allreduce_hook)

    @contextmanager
    def microbatch(self, is_last: bool) -> Iterator[None]:
        """Set what DDP's `no_sync()` sets, without the nesting."""
        if self.config.training.grad_accum_steps > 1:
            self.model.require_backward_grad_sync = is_last or self.config.training.sync_each_microbatch
        yield

    def made_for(self, func: Any, args: Any, kwargs: dict[str, Any], seen: StepRecorder) -> str:
        if func is not torch.ops.aten.empty.memory_format or in_backward() or len(seen.at_work()) != 1:
            return ""
        # a bucket of gradients, which DDP makes before its module is entered
        return "grad" if getattr(kwargs.get("dtype"), "is_floating_point", True) else ""

    def explain(self, text: str, cause: BaseException, forward: bool) -> UserError | None:
        if _TWICE in text:
            return ModelError(
                "sharding=ddp: a parameter is ready twice in one step, as where a loss calls the model twice and some "
                "parameters get no gradient; call it once, with both inputs in one batch, let each call use all (add 0 "
                "times the output of what it does not need), or use sharding=root."
            )
        if _WAITS in text:
            return UserError(
                "sharding=ddp: some parameters got no gradient in the last step, for example because layers are "
                "dropped at random or frozen later, and DDP waits for every gradient; use "
                "sharding.find_unused_parameters=true."
            )
        return None

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Let autocast choose the types, except for a converted model."""
        precision = self.config.precision
        dtype = getattr(torch, precision.param_dtype.value)
        casts = dtype is not torch.float32 and not precision.is_narrow
        with super().forward(), torch.autocast(self.device.type, dtype=dtype) if casts else nullcontext():
            yield


def _cast(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the inputs of a model as FSDP casts them."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return map_tensors(cast, args), map_tensors(cast, kwargs)
