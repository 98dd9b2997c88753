"""FSDP1: `FullyShardedDataParallel` around the modules that are FSDP2's units, with the settings that both know."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import CustomPolicy

from fsdp_lab.config.parallel import Api, OffloadTarget, PrecisionConfig
from fsdp_lab.config.trial import TrialConfig
from fsdp_lab.training.parallelize import mp_policy


def apply_fsdp1(
    model: nn.Module, units: Sequence[nn.Module], config: TrialConfig, mesh: DeviceMesh, device: torch.device
) -> nn.Module:
    """Return the model wrapped by FSDP1, or unchanged for another API.

    FSDP1 moves a unit's weights to the device, flattens them, and keeps this rank's part: the device never holds more
    than the parts and one unit.

    Args:
        model: with its weights, on the host.
        units: as `sharding_units` returns them.
    """
    if config.sharding.api is not Api.fsdp1:
        return model
    offloads = config.offload.target is not OffloadTarget.none and device != torch.device("cpu")  # it would pin
    prefetches_back = config.sharding.backward_prefetch != 0
    own = set(units)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP is switching to use `NO_SHARD`")  # for one rank, which shards nothing
        return FullyShardedDataParallel(
            model,
            device_mesh=mesh,
            sharding_strategy=ShardingStrategy[config.fsdp1_strategy],
            cpu_offload=CPUOffload(offload_params=offloads),
            auto_wrap_policy=CustomPolicy(lambda module: module in own),
            backward_prefetch=BackwardPrefetch.BACKWARD_PRE if prefetches_back else None,
            mixed_precision=mixed_precision(config.precision),
            device_id=device,
            forward_prefetch=bool(config.sharding.forward_prefetch),
            limit_all_gathers=config.sharding.limit_all_gathers,
            use_orig_params=True,
        )


def mixed_precision(precision: PrecisionConfig) -> MixedPrecision:
    """Return FSDP1's precision policy that does what FSDP2's does.

    Every unit casts its inputs, and no class of modules is left in float32: FSDP1 would do that with batch norm.
    """
    policy = mp_policy(precision)
    return MixedPrecision(
        param_dtype=policy.param_dtype,
        reduce_dtype=policy.reduce_dtype,
        cast_forward_inputs=True,
        _module_classes_to_ignore=(),
    )


def reduced_later(model: nn.Module, is_last: bool, each: bool) -> AbstractContextManager[None]:
    """Return the context of a backward pass: FSDP1 reduces the gradients of the last microbatch, or of each.

    Without, each rank keeps the gradients of the whole model. See `set_gradient_sync` for the others.
    """
    if isinstance(model, FullyShardedDataParallel) and not (is_last or each):
        return model.no_sync()
    return nullcontext()
