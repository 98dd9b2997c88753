"""FSDP1: `FullyShardedDataParallel` around the modules that are FSDP2's units, with the settings that both know."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

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

from fsdp_lab.config.errors import ModelError
from fsdp_lab.config.parallel import OffloadTarget, PrecisionConfig
from fsdp_lab.training.explain import at
from fsdp_lab.training.flat_parts import FlatParts, PartUsed
from fsdp_lab.training.parallel.base import Seen, type_of
from fsdp_lab.training.parallel.fsdp2 import mp_policy
from fsdp_lab.training.parallel.sharded import FREED, Sharded
from fsdp_lab.training.torch_private import CAST, SCATTER, reshard_flat
from fsdp_lab.workloads.base import tensors_of

_IDLE = "but current state is TrainingState.IDLE"


class FSDP1(Sharded):
    """`FullyShardedDataParallel`, which takes the model from the host, unit by unit, once it has its weights.

    It moves a unit's weights to the device, flattens them, and keeps this rank's part: the device never holds more than
    the parts and one unit.
    """

    fills_on_host: ClassVar[bool] = True
    gives_optimizer: ClassVar[str] = "; sharding.api=fsdp1 gives it flat parameters, and fsdp2 keeps the model's shapes"
    changes_shapes: ClassVar[str] = ": FSDP1 makes every parameter flat"
    keeps_shapes: ClassVar[str] = "sharding.api=fsdp2"
    one_type: ClassVar[str] = "FSDP1 makes one tensor of a unit"
    types_of_all: ClassVar[bool] = True
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
        self._watch, self.flat_parts = FlatParts(wrapped), self.dims.dp_shard

    def watched(self) -> AbstractContextManager[None]:
        """Return a look for uses of parts, in the first passes."""
        return self._watch.watched()

    @contextmanager
    def backward(self, is_last: bool) -> Iterator[None]:
        """Reduce the gradients of the last microbatch, or of each; else each rank keeps those of the whole model."""
        reduces = is_last or self.config.training.sync_each_microbatch
        with super().backward(is_last), nullcontext() if reduces else self.model.no_sync():
            yield

    def _check_parameter(self, parameter: nn.Parameter, name: str) -> None:
        if parameter.is_complex():
            raise ModelError(
                f"sharding.api=fsdp1: the parameter {name} is {type_of(parameter)}, which FSDP1 does not shard; use "
                "sharding.api=fsdp2, or register torch.view_as_real(x), and view it as complex in forward."
            )
        super()._check_parameter(parameter, name)

    def _why(self, text: str, cause: BaseException, forward: bool) -> str | None:
        if isinstance(cause, PartUsed):
            return (
                f"{self.sharding} sharding.api=fsdp1: {cause} is used outside of its unit{at(cause)}, but FSDP1 "
                "gathers the weights of a unit for its forward pass only, and each rank has a flat part of them else, "
                "whose gradients are lost. Use sharding=ddp, or call the module that holds the weight. With "
                "sharding=root weights are whole while the model is called."
            )
        if not forward and (FREED in text or _IDLE in text):
            return (
                f"{self.sharding} sharding.api=fsdp1: the backward pass reached a unit through no tensor that its "
                f"forward pass returned{at(cause)}, so FSDP1 did not gather its weights. It looks into tuples, lists, "
                "dictionaries and dataclasses, not into other objects, and loses a view that is changed in place: "
                "return tensors, or use sharding.api=fsdp2."
            )
        return super()._why(text, cause, forward)

    def sent(self, func: Any, output: Any, given: Any, seen: Seen) -> Iterator[tuple[Any, str]]:
        """Yield the tensors themselves, where FSDP2 makes copies."""
        gathers = func is not SCATTER
        yield output, "unsharded_param" if gathers else "grad"
        for tensor in tensors_of(given):
            if seen.known_as(tensor) not in ("param", "unsharded_grad"):  # it was cast, moved or padded
                yield tensor, "all_gather" if gathers else "reduce_scatter"

    def made_for(self, func: Any, args: Any, kwargs: dict[str, Any], seen: Seen) -> str:
        return "grad" if func is CAST and seen.known_as(args[0]) == "grad" else ""  # FSDP1 casts what it has reduced

    def reshard(self) -> None:
        reshard_flat(self.model)

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
