"""Replicas start with the same parameters and get the same gradients. Any other write may make them differ."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from fsdp_lab.config.errors import UserError
from fsdp_lab.memory.torch_private import norms_of
from fsdp_lab.training.parallel.base import local

_ROUNDING = 1e-4  # of a norm in float32: a thousand roundings


@torch.no_grad()
def check_replicas(named: Iterable[tuple[str, nn.Parameter]], replicas: int, device: torch.device, where: str) -> None:
    """Compare the norms of parameters, or of their shards, between replicas; every rank calls it.

    Args:
        named: the parameters.
        replicas: their number. A replica has ranks with consecutive numbers.
        device: of collectives.
        where: the start of the message.

    Raises:
        UserError: a norm differs by more than rounding. The same on all ranks.
    """
    floats = [(name, local(p)) for name, p in named if p.is_floating_point() or p.is_complex()]
    if replicas == 1 or not floats:
        return
    norms = torch.stack([norm.float().to(device) for norm in norms_of([p for _, p in floats])])
    everyone = norms.new_empty(dist.get_world_size() * len(norms))
    dist.all_gather_into_tensor(everyone, norms)
    by_replica = everyone.cpu().view(replicas, -1, len(norms))
    rounding = torch.tensor([max(_ROUNDING, torch.finfo(p.dtype).eps) for _, p in floats])
    apart = (by_replica - by_replica[0]).abs() > rounding * by_replica[0]
    for replica, rank, place in apart.nonzero().tolist():
        other = replica * by_replica.shape[1] + rank
        raise UserError(
            f"{where} {floats[place][0]} has the norm {by_replica[0, rank, place]:.6g} on rank {rank} and "
            f"{by_replica[replica, rank, place]:.6g} on rank {other}, which should hold the same. Gradients are alike, "
            "so something else writes to it: forward by a rank's own samples, as nn.Embedding(max_norm=...) does, or "
            "an optimizer that draws random numbers. Let every rank write the same (torch.distributed.all_reduce, a "
            "torch.Generator with one seed), or none: divide what the embedding returns by its norm."
        )
