"""Uses of FSDP1's parameters where a rank has a flat part of each, which compute something else without an error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from fsdp_lab.training.torch_private import DEVICE, TorchDispatchMode, flat_parameters
from fsdp_lab.workloads.base import tensors_of

_OF_ITS_TYPE = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros")
_LOOKS = 3  # forward passes, of those with gradients and of the others


class PartUsed(RuntimeError):
    """An operator got this rank's part of a parameter. The message is the parameter's name."""


class FlatParts:
    """Raises `PartUsed` if one of the first forward passes uses a part of a parameter, with FSDP1.

    Args:
        model: sharded in any way.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = flat_parameters(model)
        self._looks = {True: _LOOKS, False: _LOOKS}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch a forward pass, or what comes before it."""
        has_gradients = torch.is_grad_enabled()
        self._looks[has_gradients] -= 1
        if not self._names or self._looks[has_gradients] < 0:
            yield
            return
        with _Watch(self._names):
            yield


class _Watch(TorchDispatchMode):
    """Sees `.data` of a parameter, too, which PyTorch detaches under a mode."""

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self._names = names

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let code be compiled, and run compiled; other modes hear nothing of it, so kernels keep what they keep."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.overloadpacket.__name__
        if func is not DEVICE and name not in _OF_ITS_TYPE:  # of a fake one: it may not raise
            tensors = tensors_of((args, kwargs or {}))
            used = [self._names[id(tensor)] for tensor in tensors if id(tensor) in self._names]
            moves_parts = len(used) == len(tensors) and name.endswith("_") and not torch.is_grad_enabled()
            if used and not moves_parts:  # as a teacher follows its student, element by element
                raise PartUsed(used[0])
        return func(*args, **(kwargs or {}))
