"""FSDP1: `FullyShardedDataParallel` around the same units as FSDP2's, with the settings that both have."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
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

from fsdp_lab.config.axes.api import strategy_of
from fsdp_lab.config.axes.offload import OffloadTarget
from fsdp_lab.config.errors import ModelError, UserError
from fsdp_lab.memory.recorder import StepRecorder
from fsdp_lab.memory.torch_private import CAST, DEVICE, SCATTER, TorchDispatchMode, flat_parameters, reshard_flat
from fsdp_lab.training.parallel.base import at, type_of
from fsdp_lab.training.parallel.fsdp2 import mp_policy
from fsdp_lab.training.parallel.sharded import FREED, Sharded
from fsdp_lab.workloads.base import tensors_of

_OF_ITS_TYPE = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros")
_IDLE = "but current state is TrainingState.IDLE"


class FSDP1(Sharded):
    """`FullyShardedDataParallel`, which shards a model with weights on the host, unit by unit.

    It moves a unit's weights to the device, flattens them, and keeps this rank's part. So the device never holds more
    than the parts and one unit.
    """

    fills_on_host: ClassVar[bool] = True
    gives_optimizer: ClassVar[str] = "; sharding.api=fsdp1 gives it flat parameters, and fsdp2 keeps the model's shapes"
    changes_shapes: ClassVar[str] = ": FSDP1 makes every parameter flat"
    keeps_shapes: ClassVar[str] = "sharding.api=fsdp2"
    one_type: ClassVar[str] = "FSDP1 makes one tensor of a unit"
    types_of_all: ClassVar[bool] = True
    asks_all_for = "sharding.api=fsdp1"

    def wrap(self, model: nn.Module, find_unused: bool) -> None:
        config, sharding = self.config, self.config.sharding
        offloads = config.offload.target is not OffloadTarget.none and self.device != torch.device("cpu")  # would pin
        own, policy = {group[0] for group in self._groups}, mp_policy(config.precision)
        made: dict[str, FullyShardedDataParallel] = {}
        for name, root in self.roots(model).items():
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "FSDP is switching to use `NO_SHARD`")  # one rank
                made[name] = FullyShardedDataParallel(
                    root,
                    device_mesh=self.dims.mesh,
                    sharding_strategy=ShardingStrategy[strategy_of(config)],
                    cpu_offload=CPUOffload(offload_params=offloads),
                    auto_wrap_policy=CustomPolicy(lambda module: module in own),
                    backward_prefetch=BackwardPrefetch.BACKWARD_PRE if sharding.backward_prefetch != 0 else None,
                    mixed_precision=MixedPrecision(
                        policy.param_dtype,
                        policy.reduce_dtype,
                        cast_forward_inputs=True,
                        _module_classes_to_ignore=(),  # batch norm would stay in float32
                    ),
                    device_id=self.device,
                    forward_prefetch=bool(sharding.forward_prefetch),
                    limit_all_gathers=sharding.limit_all_gathers,
                    use_orig_params=True,
                )
            if name:
                setattr(model, name, made[name])
        self._roots = [*made.values()]
        wrapped = made.get("", model)
        super().wrap(wrapped, find_unused)
        self.flat_parts = self.dims.dp_shard
        self._names, self._looks = flat_parameters(wrapped), {True: 3, False: 3}  # with gradients, and without

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Refuse uses of a rank's own parts of parameters, in the first passes."""
        has_gradients = torch.is_grad_enabled()
        self._looks[has_gradients] -= 1
        with _PartsRefused(self._names) if self._looks[has_gradients] >= 0 else nullcontext():
            yield

    @contextmanager
    def backward(self, is_last: bool) -> Iterator[None]:
        """Reduce the gradients of the last microbatch, or of each; else each rank keeps those of the whole model."""
        # with `task.step`, each: else parts that the last microbatch's loss does not use would not be reduced
        reduces = is_last or self.config.training.sync_each_microbatch or self.config.task.step is not None
        with super().backward(is_last), nullcontext() if reduces else self._roots[0].no_sync():
            yield

    def stored_bytes(self, parts: Sequence[Tensor]) -> int:
        size = sum(part.numel() for part in parts)
        return -(-size // self.dims.dp_shard) * parts[0].itemsize if parts else 0

    def _check_parameter(self, parameter: nn.Parameter, name: str) -> None:
        if parameter.is_complex():
            raise ModelError(
                f"sharding.api=fsdp1: the parameter {name} is {type_of(parameter)}, which FSDP1 does not shard; use "
                "sharding.api=fsdp2, or register torch.view_as_real(x), and view it as complex in forward."
            )
        super()._check_parameter(parameter, name)

    def explain(self, text: str, cause: BaseException, forward: bool) -> UserError | None:
        if isinstance(cause, PartUsed):
            return ModelError(
                f"{self.sharding} sharding.api=fsdp1: {cause} is used outside of its unit{at(cause)}, but FSDP1 "
                "gathers the weights of a unit for its forward pass only. Otherwise each rank has a flat part of them, "
                "and its gradients are lost. Use sharding=ddp, or call the module that holds the weight. With "
                "sharding=root weights are whole while the model is called."
            )
        if not forward and (FREED in text or _IDLE in text):
            return ModelError(
                f"{self.sharding} sharding.api=fsdp1: the backward pass reached a unit through no tensor that its "
                f"forward pass returned{at(cause)}, so FSDP1 did not gather its weights. It looks into tuples, lists, "
                "dictionaries and dataclasses, not into other objects, and loses a view that is changed in place: "
                "return tensors, or use sharding.api=fsdp2."
            )
        return super().explain(text, cause, forward)

    def sent(self, func: Any, output: Any, given: Any, seen: StepRecorder) -> Iterator[tuple[Any, str]]:
        """Yield the collective's own tensors, because FSDP1 makes no copies as FSDP2 does."""
        gathers = func is not SCATTER
        yield output, "unsharded_param" if gathers else "grad"
        for tensor in tensors_of(given):
            if seen.known_as(tensor) not in ("param", "unsharded_grad"):  # it was cast, moved or padded
                yield tensor, "all_gather" if gathers else "reduce_scatter"

    def made_for(self, func: Any, args: Any, kwargs: dict[str, Any], seen: StepRecorder) -> str:
        return "grad" if func is CAST and seen.known_as(args[0]) == "grad" else ""  # FSDP1 casts what it has reduced

    def reshard(self) -> None:
        reshard_flat(self.model)

    def clip(self, max_norm: float | None) -> Tensor:
        """Clip by FSDP1, which knows the parts of all ranks."""
        if len(self._roots) == 1:
            return self._roots[0].clip_grad_norm_(math.inf if max_norm is None else max_norm)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*with no gradients")  # of a rank that has no element of a part
            norms = [root.clip_grad_norm_(math.inf) for root in self._roots]  # every rank calls it for every part
        norm = torch.linalg.vector_norm(torch.stack(norms))
        if max_norm is not None:
            nn.utils.clip_grads_with_norm_(self.model.parameters(), max_norm, norm)
        return norm


class PartUsed(RuntimeError):
    """An operator got this rank's part of a parameter. The message is the parameter's name."""


class _PartsRefused(TorchDispatchMode):
    """Raises `PartUsed` if an operator gets a part, or `.data` of one, which PyTorch detaches under a mode."""

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self._names = names

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let code be compiled, and run compiled. Other modes do not see this, so kernels save the same."""
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
