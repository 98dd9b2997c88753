"""Gloo's collectives in a step that records its memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from fsdp_lab.memory.allocator_profile import not_reported
from fsdp_lab.memory.torch_private import (
    FUNCTIONAL_COLLECTIVES,
    GATHER,
    SCATTER,
    TorchDispatchMode,
    finished_work,
    in_backward,
    wait_for_functional,
)


class SynchronousGlooMode(TorchDispatchMode):
    """Makes gloo's collectives synchronous, on copies of their tensors.

    Gloo's threads hold tensors for a varying time after a collective. This mode waits at once and gives gloo copies,
    which are not recorded, so every run has the same tensors. DDP's float32 buckets are not copied: they stay alive in
    any case, and DDP needs the same tensors back.
    """

    _ALL_REDUCE = torch.ops.c10d.allreduce_.default
    _BROADCAST = torch.ops.c10d.broadcast_.default  # DDP sends the order of its gradients in the second step

    def __init__(self) -> None:
        super().__init__()
        self._stream = torch.cpu.current_stream()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        if func in (GATHER, SCATTER) and args[0].device.type == "cpu":
            output, given, *rest = args
            with not_reported():
                reached = torch.empty_like(output)
                _wait(func(reached, given.clone(), *rest, **kwargs))
                output.copy_(reached)
            return output, finished_work()  # finished: a second wait would return gloo's own buffers
        if func in FUNCTIONAL_COLLECTIVES and args[0].device.type == "cpu":  # DTensor's: a gradient norm
            given, *rest = args
            with not_reported():
                reached = wait_for_functional(func(given.clone(), *rest, **kwargs))
            return reached.clone()
        if func in (self._ALL_REDUCE, self._BROADCAST) and args[0][0].device.type == "cpu":
            tensors, *rest = args
            of_ddp = in_backward() and torch.cpu.current_stream() is self._stream  # FSDP1 enters its own stream
            if func is self._ALL_REDUCE and tensors[0].dtype is torch.float32 and of_ddp:
                return tensors, _wait(func(tensors, *rest, **kwargs))
            with not_reported():
                copies = [tensor.clone() for tensor in tensors]
                work = _wait(func(copies, *rest, **kwargs))
                for tensor, copy in zip(tensors, copies, strict=True):
                    tensor.copy_(copy)
            return tensors, work
        return func(*args, **kwargs)


def _wait(result: Any) -> Any:
    work = result[1]
    dist.Work.unbox(work).wait()
    return work
