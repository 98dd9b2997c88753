"""Move what autograd saves of a block to host memory until the backward pass.

`torch.autograd.graph.save_on_cpu` also moves weights, and moves a tensor once for each operator that saves it.
`use=pytorch` prints what follows the imports.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from fsdp_lab.config.axes.activation_offload import SMALLEST
from fsdp_lab.memory.torch_private import is_plain, version_of, wait_for


def offload_blocks(blocks: Sequence[nn.Module], units: Sequence[nn.Module]) -> None:
    """Keep what autograd saves of these blocks in host memory between the passes. In place, without new names.

    Args:
        units: the modules that are to become sharding units.
    """
    copies: Any = WeakIdKeyDictionary()  # storage on the device -> a reference to its copy
    for block in blocks:
        inside = {*block.modules()} - {block}
        block.forward = _saving_on_host(block, copies, not inside.isdisjoint(units))


def _saving_on_host(block: nn.Module, copies: Any, has_units: bool) -> Callable[..., Any]:
    """Return the forward pass of a block, with all that it saves on the host, except weights and buffers.

    Args:
        has_units: units inside the block gather their weights while it runs.
    """
    forward = block.forward

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        held = _held(block)

        def pack(tensor: Tensor) -> Tensor | Callable[[], Tensor]:
            local = _local(tensor)
            if not is_plain(local) or local.is_complex() or (storage := local.untyped_storage()).nbytes() < SMALLEST:
                return tensor
            if storage in (_held(block) if has_units else held):
                return tensor
            copy = copies.get(storage, lambda: None)()
            if copy is None or copy.state != (version_of(local), local.dtype):
                copy = _Copy(local)
                copies[storage] = weakref.ref(copy)
            back = partial(copy.back, local.storage_offset(), local.shape, local.stride())
            if not isinstance(tensor, DTensor):
                return back
            whole: dict[str, Any] = {"run_check": False, "shape": tensor.shape, "stride": tensor.stride()}
            mesh, placements = tensor.device_mesh, tensor.placements
            return lambda: DTensor.from_local(back(), mesh, placements, **whole)

        with saved_tensors_hooks(pack, lambda saved: saved if isinstance(saved, Tensor) else saved()):
            return forward(*args, **kwargs)

    return run


@torch.no_grad()
def _local(tensor: Tensor) -> Tensor:
    return wait_for(tensor.to_local()) if isinstance(tensor, DTensor) else tensor  # type: ignore[no-any-return]


def _held(block: nn.Module) -> set[torch.UntypedStorage]:
    """Return the memory of a block's modules, which is not moved: weights, gathered or FSDP1's views, and buffers."""
    held = set[torch.UntypedStorage]()
    for module in block.modules():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False), *vars(module).values()):
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
                held.add(_local(tensor).untyped_storage())
    return held


class _Copy:
    """All memory of a tensor, on the host. Both copies run on the current stream, and the host waits for neither."""

    def __init__(self, tensor: Tensor) -> None:
        self.state, self._device = (version_of(tensor), tensor.dtype), tensor.device
        flat = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
        self._host = torch.empty_like(flat, device="cpu", pin_memory=tensor.device.type == "cuda")
        self._host.copy_(flat, non_blocking=True)
        self._back: Callable[[], torch.UntypedStorage | None] = lambda: None

    def back(self, offset: int, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
        """Return a tensor of this memory on the device. All tensors that exist at once share it."""
        storage = self._back()
        if storage is None:
            flat = torch.empty_like(self._host, device=self._device)
            storage = flat.copy_(self._host, non_blocking=True).untyped_storage()
            self._back = weakref.ref(storage)
        return torch.empty(0, dtype=self._host.dtype, device=self._device).set_(storage, offset, shape, stride)
