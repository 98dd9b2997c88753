"""FSDP1: `FullyShardedDataParallel` around the modules that are FSDP2's units, with the settings that both know."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import CustomPolicy

from fsdp_lab.config.parallel import OffloadTarget, PrecisionConfig
from fsdp_lab.training.flat_parts import FlatParts
from fsdp_lab.training.parallel.fsdp2 import mp_policy
from fsdp_lab.training.parallel.sharded import Sharded


class FSDP1(Sharded):
    """`FullyShardedDataParallel`, which takes the model from the host, unit by unit, once it has its weights.

    It moves a unit's weights to the device, flattens them, and keeps this rank's part: the device never holds more than
    the parts and one unit.
    """

    fills_on_host: ClassVar[bool] = True
    gives_optimizer: ClassVar[str] = "; sharding.api=fsdp1 gives it flat parameters, and fsdp2 keeps the model's shapes"
    changes_shapes: ClassVar[str] = ": FSDP1 makes every parameter flat"
    keeps_shapes: ClassVar[str] = "sharding.api=fsdp2"
    asks_all = "sharding.api=fsdp1"
    model: FullyShardedDataParallel

    def wrap(self, model: nn.Module, find_unused: bool) -> None:
        """Wrap the units and the model."""
        config, sharding = self.config, self.config.sharding
        offloads = config.offload.target is not OffloadTarget.none and self.device != torch.device("cpu")  # would pin
        own = {*self._units}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "FSDP is switching to use `NO_SHARD`")  # one rank
            wrapped = FullyShardedDataParallel(
                model,
                device_mesh=self.dims.mesh,
                sharding_strategy=ShardingStrategy[config.fsdp1_strategy],
                cpu_offload=CPUOffload(offload_params=offloads),
                auto_wrap_policy=CustomPolicy(lambda module: module in own),
                backward_prefetch=BackwardPrefetch.BACKWARD_PRE if sharding.backward_prefetch != 0 else None,
                mixed_precision=mixed_precision(config.precision),
                device_id=self.device,
                forward_prefetch=bool(sharding.forward_prefetch),
                limit_all_gathers=sharding.limit_all_gathers,
                use_orig_params=True,
            )
        super().wrap(wrapped, find_unused)
        self._parts = FlatParts(wrapped)

    def watched(self) -> AbstractContextManager[None]:
        """Return a look for uses of parts, in the first passes."""
        return self._parts.watched()

    @contextmanager
    def backward(self, is_last: bool) -> Iterator[None]:
        """Reduce the gradients of the last microbatch, or of each; else each rank keeps those of the whole model."""
        reduces = is_last or self.config.training.sync_each_microbatch
        with super().backward(is_last), nullcontext() if reduces else self.model.no_sync():
            yield

    def clip(self, max_norm: float | None) -> Tensor:
        """Let FSDP1 clip: it knows the parts of all ranks."""
        return self.model.clip_grad_norm_(math.inf if max_norm is None else max_norm)


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
