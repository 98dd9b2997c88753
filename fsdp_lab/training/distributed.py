"""Process group, device, and how the ranks divide the work: the same code on GPUs with NCCL and on CPUs with gloo."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_lab.config.axes.offload import OffloadConfig, OffloadTarget
from fsdp_lab.memory.torch_private import forget_meshes

T = TypeVar("T")
_TIMEOUT = timedelta(minutes=30)  # of collectives


@dataclass(frozen=True)
class DistributedContext:
    rank: int
    local_rank: int
    world_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def device_name(self) -> str:
        return "cpu" if self.device.type == "cpu" else torch.cuda.get_device_name(self.device)


def sees_cuda() -> tuple[bool, str | None]:
    """Return whether PyTorch sees a GPU, and the CUDA version that it is built for; None: without CUDA."""
    return torch.cuda.is_available(), torch.version.cuda


def free_on_gpu() -> int:
    """Return the bytes that are free on this process's GPU. Raises what PyTorch raises without one."""
    return torch.cuda.mem_get_info()[0]


def setup_distributed(offload: OffloadConfig | None = None, timeout: timedelta = _TIMEOUT) -> DistributedContext:
    """Join the process group that torchrun's variables describe, or use the one that a launcher has made.

    Without such variables the group has one process, so a plain `python -m fsdp_lab.training` works. Its store is in
    memory: PyTorch's TCP store would listen on every interface.

    Args:
        offload: of the trial, which decides the backends; None: those of any trial.
        timeout: of each collective.
    """
    cuda = torch.cuda.is_available() and (not dist.is_initialized() or "nccl" in str(dist.get_backend_config()))
    if not dist.is_initialized():
        if cuda:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        offload = offload or OffloadConfig(OffloadTarget.cpu)
        join_process_group(offload.backend(cuda), timeout)
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    return DistributedContext(dist.get_rank(), int(os.environ.get("LOCAL_RANK", 0)), dist.get_world_size(), device)


def choose_gpu(index: int) -> None:
    """Compute on the GPU with this index among the visible ones."""
    torch.cuda.set_device(index)


def keep_threads() -> None:
    """Set PyTorch's threads to `OMP_NUM_THREADS`: Ray sets it after the process has imported PyTorch."""
    if (threads := os.environ.get("OMP_NUM_THREADS", "")).isdigit() and int(threads) > 0:
        torch.set_num_threads(int(threads))


def join_process_group(backend: str, timeout: timedelta = _TIMEOUT) -> None:
    """Make the default process group by the variables of launchers; with NCCL it is bound to this process's GPU.

    Without a device, NCCL in PyTorch 2.15 takes the GPU `LOCAL_RANK % device_count` and rejects tensors on another. Ray
    may have given another one to this rank.

    Args:
        backend: see `OffloadConfig.backend`.
        timeout: of each collective.
    """
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    by: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if alone else {}
    device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in backend else None
    dist.init_process_group(backend, device_id=device, timeout=timeout, **by)


def leave_process_group() -> None:
    """Leave the process group, whose threads may otherwise outlive the interpreter and then abort the process."""
    if dist.is_initialized():
        dist.destroy_process_group()
        forget_meshes()


@dataclass(frozen=True)
class ParallelDims:
    """How the ranks divide the work: `dp_replicate` groups of `dp_shard` shards of `tp` tensor-parallel ranks.

    Code that divides samples, or averages over their parts, uses the data-parallel degree and rank, not the world's
    size.

    Attributes:
        mesh: the divided axes: `(dp_shard,)`, `(dp_replicate, dp_shard)` or, for DDP, `(dp_replicate,)`. None: only the
            numbers are needed.
        tp_mesh: the ranks that share this rank's samples and layers; None: `tp` is 1.
        dp_group: the ranks that hold the other samples of a batch; None: all ranks.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    rank: int = 0
    mesh: DeviceMesh | None = field(default=None, compare=False, repr=False)
    tp_mesh: DeviceMesh | None = field(default=None, compare=False, repr=False)
    dp_group: dist.ProcessGroup | None = field(default=None, compare=False, repr=False)

    @property
    def dp_degree(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def dp_rank(self) -> int:
        """The index of this rank's part; tensor-parallel ranks share one."""
        return self.rank // self.tp

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Add a tensor up over the data-parallel ranks, in place, and return it."""
        dist.all_reduce(values, group=self.dp_group)
        return values


def build_parallel_dims(axes: Mapping[str, int], ranks: DistributedContext) -> ParallelDims:
    """Divide the ranks and make their mesh, by `Parallel.axes`."""
    mesh = init_device_mesh(ranks.device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    degrees = axes.get("dp_replicate", 1), axes.get("dp_shard", 1)
    *divided, innermost = axes
    if innermost != "tp":
        return ParallelDims(*degrees, rank=ranks.rank, mesh=mesh)
    tp = axes["tp"]
    if len(divided) == 1:
        dp_group: Any = mesh.get_group("dp_shard")
    else:
        parts = [list(range(first, ranks.world_size, tp)) for first in range(tp)]
        dp_group, _ = dist.new_subgroups_by_enumeration(parts)
    return ParallelDims(*degrees, tp, ranks.rank, mesh[tuple(divided)], mesh["tp"], dp_group)


def own_node() -> str:
    """Return the number of this rank's node, as Ray or torchrun counts them."""
    return os.environ.get("NODE_RANK", os.environ.get("GROUP_RANK", "0"))


def gather(value: T) -> list[T]:
    """Return the values of all ranks in their order, on every rank. So all can fail together with the same message."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def together(do: Callable[[], T]) -> T:
    """Return this rank's result. If a rank fails, every rank raises the first such error, so that none waits for it."""
    failed: Exception | None = None
    try:
        result = do()
    except Exception as error:  # noqa: BLE001 (it is raised below)
        failed = error
    for rank, first in enumerate(gather(failed and _sendable(failed))):
        if first is not None:
            raise failed if failed is not None and rank == dist.get_rank() else first
    return result


def _sendable(error: Exception) -> Exception:
    """Return the error, or one with its text: some cannot be sent, and some cannot be made again from their text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 (whatever a class of the user's raises)
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def largest(value: float) -> float:
    """Return the largest of the ranks' values, on every rank."""
    return max(gather(value))
