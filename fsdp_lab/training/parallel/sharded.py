"""What FSDP1 and FSDP2 have in common."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import nn

from fsdp_lab.config.errors import ModelError, UserError
from fsdp_lab.config.parallel import Dtype, ShardingConfig
from fsdp_lab.training.explain import MIXED, at
from fsdp_lab.training.parallel.base import Parallel, type_of
from fsdp_lab.training.parallel.units import in_groups
from fsdp_lab.training.shardable import check_hooks, held_parameters
from fsdp_lab.training.torch_private import Place, has_own_parameter, places_of_parameters
from fsdp_lab.training.unit_hooks import ContainerHooks
from fsdp_lab.workloads.base import original_name

FREED = "out of bounds for storage of size 0"
_TYPES = ("must have the same dtype", "expected scalar type", "should be the same")


class Sharded(Parallel):
    """Each rank has a part of each parameter, and units of the model are gathered when they are used.

    Attributes:
        one_type: what FSDP does with the tensors of a unit, which have one type then; for a message.
        types_of_all: whether those without a gradient are among these.
        hooks: of units.
    """

    is_sharded: ClassVar[bool] = True
    one_type: ClassVar[str] = "FSDP2 reduces the gradients of a unit"
    types_of_all: ClassVar[bool] = False
    hooks: ClassVar[type[ContainerHooks]] = ContainerHooks
    _units: Sequence[nn.Module]
    _groups: Sequence[Sequence[nn.Module]]  # what shares a unit, without the root

    @staticmethod
    def axes(sharding: ShardingConfig, world_size: int) -> dict[str, int]:
        shards = {"dp_shard": sharding.dp_shard(world_size)}
        return shards if sharding.dp_replicate == 1 else {"dp_replicate": sharding.dp_replicate, **shards}

    def check_made(self, model: nn.Module) -> None:
        super().check_made(model)
        check_hooks(model, self.sharding, "use sharding=ddp, which keeps it")
        for name, holder in held_parameters(model):
            raise ModelError(
                f"{self.sharding}: {holder} holds the parameter {name}, but {self.api} puts a shard in its place, and "
                "what is held is not trained; look it up where it is used, as in self.head.weight, or use sharding=ddp."
            )

    def divide(self, model: nn.Module, units: Sequence[nn.Module], last: Sequence[nn.Module]) -> None:
        super().divide(model, units, last)
        self._units, groups = units, in_groups(model, units, self.config.sharding.blocks_per_unit)
        self._groups = [*groups, [*last]] if last else groups
        names = {id(module): name for name, module in model.named_modules()}
        self._check_units(model, names)
        for parameter in model.parameters():  # transposed, expanded, or in `channels_last`: their values stay
            if not parameter.is_contiguous():
                parameter.data = parameter.data.contiguous()  # in place: ties stay
        for unit in units:
            self.hooks(unit, names[id(unit)], self.config)  # before FSDP2's own hooks, which run after these

    def _check_parameter(self, parameter: nn.Parameter, name: str) -> None:
        super()._check_parameter(parameter, name)
        param_dtype = self.config.precision.param_dtype
        if not parameter.ndim:
            raise ModelError(
                f"{self.sharding}: the parameter {name} is a scalar, and {self.api} shards the first dimension; "
                "register it with one, as x.reshape(1), or use sharding=ddp."
            )
        if parameter.dtype is torch.float64 and param_dtype is not Dtype.float32:
            raise ModelError(
                f"precision.param_dtype={param_dtype.value}: the parameter {name} is {type_of(parameter)}, of which "
                f"{self.api} would keep too little; use precision=fp32, which keeps the dtypes of a model."
            )

    def _check_units(self, model: nn.Module, names: dict[int, str]) -> None:
        for module in model.modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
                raise ModelError(
                    f"{self.sharding}: {names[id(module)]} ({type(module).__name__}) has sparse=True, but {self.api} "
                    "reduces dense gradients only; build it with sparse=False, or use sharding=ddp."
                )
        of = {id(parameter): name for name, parameter in model.named_parameters()}
        taken: set[int] = set()
        for unit in (*self._groups, [model]):
            inside = [p for module in unit for p in module.parameters() if self.types_of_all or p.requires_grad]
            own = [p for p in inside if id(p) not in taken]
            taken |= {id(parameter) for parameter in own}
            for first, second in pairwise(own):
                if first.dtype is not second.dtype:
                    raise ModelError(
                        f"{self.sharding}: {of[id(first)]} is {type_of(first)} and {of[id(second)]} is "
                        f"{type_of(second)}, but {self.one_type}, here {names[id(unit[0])] or 'the root'}, in one "
                        "dtype; give them one dtype, or units of their own (sharding=per_layer, or sharding=per_block "
                        "model.block_classes=[...]), or use sharding=ddp."
                    )

    def wrap(self, model: nn.Module, find_unused: bool) -> None:
        """Let modules check that they are called with their own parameters, which FSDP puts in place.

        `torch.func.functional_call` puts others there, which would not be used. Code that is compiled is not checked
        inside of FSDP1's units.
        """
        super().wrap(model, find_unused)
        names = {id(module): original_name(name) for name, module in model.named_modules()}
        for module, places in places_of_parameters(model, inside=not self.config.compile):
            check = partial(_check_own, self.sharding, self.api, names, places)
            module.register_forward_pre_hook(check, prepend=True)  # before FSDP's

    def explain(self, error: Exception, forward: bool) -> UserError | None:
        if (why := super().explain(error, forward)) is not None:
            return why
        words = self._why(str(error), error.__cause__ or error, forward)
        return ModelError(words) if words else None

    def _why(self, text: str, cause: BaseException, forward: bool) -> str | None:
        policy, param_dtype = self.config.reshard_after_forward.policy, self.config.precision.param_dtype
        if FREED in text or MIXED in text:
            return (
                f"{self.sharding} reshard_after_forward={policy.name}: a tensor of a unit is used after its parameters "
                f"were freed{at(cause)}. FSDP2 gathers them again for tensors that a forward pass returns: return it "
                "as a tensor or in a container, .clone() a view, or use reshard_after_forward=never."
            )
        if param_dtype is not Dtype.float32 and any(words in text for words in _TYPES):
            return (
                f"precision.param_dtype={param_dtype.value}: {str(cause).rstrip('.')}{at(cause)}. {self.api} casts "
                f"parameters and inputs to {param_dtype.value}, and no buffers{_buffers(cause, self.model)} or what "
                "forward makes: cast these there, as buffer.to(x.dtype), or use precision=fp32 or sharding=ddp."
            )
        return None


@torch.compiler.disable
def _check_own(
    sharding: str, api: str, names: dict[int, str], places: list[Place], called: nn.Module, args: Any
) -> None:
    for place in places:
        if not has_own_parameter(place):
            name = f"{names[id(place[0])]}.{place[1]}".removeprefix(".")
            raise ModelError(
                f"{sharding}: {names[id(called)] or 'the root'} is called with another tensor as {name}, as by "
                f"torch.func.functional_call, but {api} puts its own there; use sharding=ddp, or sharding=root with "
                "sharding.api=fsdp2 and call a part of the model so."
            )


def _buffers(error: BaseException, model: nn.Module) -> str:
    """Return the float32 buffers of the innermost module that was at work and has some; "" if none has."""
    names = {id(module): original_name(name) for name, module in model.named_modules()}
    for frame, _ in reversed([*traceback.walk_tb(error.__traceback__)]):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and id(module) in names:
            own = [leaf for leaf, buffer in module.named_buffers(recurse=False) if buffer.dtype is torch.float32]
            if own:
                return f" (here {', '.join('.'.join(filter(None, (names[id(module)], leaf))) for leaf in own)})"
    return ""
