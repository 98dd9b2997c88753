"""Private names of PyTorch that training needs, each with what happens when a version lacks it.

`tests/training/test_torch_private.py` names the missing symbol. Fallbacks are correct and cost more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.distributed.fsdp import _fully_shard as package

_POST_FORWARD_MESH = "_get_post_forward_mesh_info"
_CLEAR_WORKSPACES = "_cuda_clearCublasWorkspaces"
_HAS_CONTEXT = "_cuda_hasPrimaryContext"


@contextmanager
def one_post_forward_mesh() -> Iterator[None]:
    """Let every `fully_shard` call inside that reshards to a smaller mesh use the same one.

    PyTorch makes a mesh for each call, with process groups, and so communicators, of its own: about 150 for the 25
    units of a ViT-L/16 on 8 workers. Where the private function is missing, PyTorch's own behaviour stays.
    """
    module = getattr(package, "_fully_shard", None)
    make: Callable[..., Any] | None = getattr(module, _POST_FORWARD_MESH, None)
    if make is None:
        yield
        return
    made: dict[Any, Any] = {}

    def make_once(reshard_after_forward: Any, mesh_info: Any) -> Any:
        if isinstance(reshard_after_forward, bool):
            return make(reshard_after_forward, mesh_info)
        key = (reshard_after_forward, mesh_info.mesh)
        if key not in made:
            made[key] = make(reshard_after_forward, mesh_info)
        return made[key]

    with mock.patch.object(module, _POST_FORWARD_MESH, make_once):
        yield


def free_cublas_workspaces(device: torch.device) -> int | None:
    """Free what cuBLAS took from the allocator for its workspaces; the next matrix product takes it again.

    Returns:
        the requested bytes that were freed; None where this PyTorch cannot free them.
    """
    free: Callable[[], None] | None = getattr(torch._C, _CLEAR_WORKSPACES, None)
    if free is None:
        return None
    before = torch.cuda.memory_stats(device)["requested_bytes.all.current"]
    free()
    return int(before - torch.cuda.memory_stats(device)["requested_bytes.all.current"])


def gpus_with_context() -> list[int] | None:
    """The GPUs on which this process has opened a context; None where this PyTorch does not tell."""
    has_context: Callable[[int], bool] | None = getattr(torch._C, _HAS_CONTEXT, None)
    return None if has_context is None else [i for i in range(torch.cuda.device_count()) if has_context(i)]
