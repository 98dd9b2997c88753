"""From a workload to everything that a step changes: the one path that training and forecasts share.

The order is FSDP2's: shard bottom-up, materialise, and only then the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from fsdp_lab.config.trial import TrialConfig
from fsdp_lab.training.checkpoint import TrainState
from fsdp_lab.training.distributed import ParallelDims
from fsdp_lab.training.optimizer import build_lr_schedule, build_optimizer, build_scaler, gradient_device
from fsdp_lab.training.parallelize import apply_ddp, apply_fully_shard, apply_to_blocks
from fsdp_lab.workloads.base import ModelSpec


def build(
    spec: ModelSpec,
    config: TrialConfig,
    dims: ParallelDims,
    device: torch.device,
    materialize: Callable[[nn.Module], None],
    steps_per_epoch: int = 1,
    total_steps: int = 1,
) -> TrainState:
    """Build, shard and materialise the model, then make what trains it.

    Args:
        device: where the model computes.
        materialize: gives the parameters of a model on `meta` their storage and values, in place.
        steps_per_epoch, total_steps: of the learning-rate schedule.
    """
    assert dims.mesh is not None
    with torch.device("meta"):
        model = spec.build()
    apply_to_blocks(model, spec.block_classes, config)
    apply_fully_shard(model, spec.block_classes, config, dims.mesh)
    materialize(model)
    model = apply_ddp(model, config, device)

    optimizer = build_optimizer(model, config, dims.dp_degree)
    scaler = build_scaler(config.precision, gradient_device(config, device))
    lr_schedule = build_lr_schedule(optimizer, config.lr_schedule, steps_per_epoch, total_steps)
    return TrainState(model, optimizer, scaler, lr_schedule)
