"""The ways to train a model on several ranks: a class each, chosen here and nowhere else."""

from __future__ import annotations

from fsdp_lab.config.trial import TrialConfig
from fsdp_lab.training.distributed import DistributedContext, build_parallel_dims
from fsdp_lab.training.parallel.base import Parallel
from fsdp_lab.training.parallel.ddp import DDP
from fsdp_lab.training.parallel.fsdp1 import FSDP1
from fsdp_lab.training.parallel.fsdp2 import FSDP2
from fsdp_lab.training.parallel.tensor import TensorParallel

_WAYS: dict[str, type[Parallel]] = {"ddp": DDP, "fsdp1": FSDP1, "fsdp2": FSDP2, "tensor": TensorParallel}


def way_of(config: TrialConfig) -> type[Parallel]:
    """Return the class of the way in which a trial trains."""
    return _WAYS[config.sharding.kind]


def build_parallel(config: TrialConfig, ranks: DistributedContext) -> Parallel:
    """Return the way in which a trial trains on these ranks, with their mesh. Every rank calls this."""
    way = way_of(config)
    return way(config, build_parallel_dims(way.axes(config.sharding, ranks.world_size), ranks), ranks.device)
