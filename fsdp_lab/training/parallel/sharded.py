"""What FSDP1 and FSDP2 have in common."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fsdp_lab.config.axes.precision import Dtype
from fsdp_lab.config.axes.reshard import ReshardPolicy
from fsdp_lab.config.errors import ModelError, UserError
from fsdp_lab.config.ranks import Ranks
from fsdp_lab.config.trial import ShardingConfig, TrialConfig
from fsdp_lab.memory.torch_private import Place, has_hooks, has_own_parameter, places_of_parameters
from fsdp_lab.training.layout import Unit
from fsdp_lab.training.parallel.base import MIXED, TYPES, Parallel, at, type_of
from fsdp_lab.training.parallel.units import in_groups
from fsdp_lab.workloads.base import original_name, parts_of
from fsdp_lab.workloads.generators import reached

FREED = "out of bounds for storage of size 0"


class ContainerHooks:
    """Checks that a unit changes no list or dictionary of which FSDP gives it a copy. Made before sharding."""

    def __init__(self, unit: nn.Module, name: str, config: TrialConfig) -> None:
        self._unit, self._name, self._api = unit, name, config.sharding.api_name
        self._casts = config.precision.param_dtype is not Dtype.float32
        self._before: list[tuple[Any, list[int]]] = []
        unit.register_forward_pre_hook(self.enter, with_kwargs=True)
        unit.register_forward_hook(self.leave)

    def copies(self, given: Any) -> bool:
        """Return whether FSDP makes a copy of a list or dictionary."""
        return self._casts

    @torch.compiler.disable
    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note the lists and dictionaries that the unit gets a copy of."""
        self._before = [
            (given, [*map(id, _parts(given))])
            for given in (*args, *kwargs.values())
            if isinstance(given, list | dict) and self.copies(given)
        ]

    @torch.compiler.disable
    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Look at what the unit has changed.

        Raises:
            ModelError: it has changed a copy.
        """
        for container, before in self._before if torch.is_grad_enabled() else ():
            if before != [*map(id, _parts(container))] and not any(container is one for one in _objects(output)):
                raise ModelError(
                    f"{self._name} changes a {type(container).__name__} that it gets, of which {self._api} hands it a "
                    "copy, so the change would be lost; let it return what it adds, or use sharding=ddp or "
                    "sharding=root."
                )
        self._before = []


class Sharded(Parallel):
    """Each rank has a part of each parameter, and units of the model are gathered when they are used."""

    is_sharded: ClassVar[bool] = True
    one_type: ClassVar[str]  # why the parameters of a unit have one type
    types_of_all: ClassVar[bool] = False  # of those without a gradient, too
    hooks: ClassVar[type[ContainerHooks]] = ContainerHooks
    _groups: Sequence[Sequence[nn.Module]]  # what shares a unit, without the root

    @staticmethod
    def axes(sharding: ShardingConfig, world_size: int) -> dict[str, int]:
        shards = {"dp_shard": Ranks.of(sharding, world_size).shard}
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
        groups = in_groups(model, units, self.config.sharding.blocks_per_unit)
        self._groups = [*groups, [*last]] if last else groups
        names = {id(module): name for name, module in model.named_modules()}
        self._check_units(model, names)
        self.units = [*self._describe(model, names)]
        for parameter in model.parameters():  # some are transposed, expanded, or in `channels_last`; values stay
            if not parameter.is_contiguous():
                parameter.data = parameter.data.contiguous()  # in place: ties stay
        for unit in units:
            self.hooks(unit, names[id(unit)], self.config)  # before FSDP2's own hooks, which run after these

    def _describe(self, model: nn.Module, names: dict[int, str]) -> Iterator[Unit]:
        left = {id(parameter): (name, parameter) for name, parameter in model.named_parameters()}
        for group in (*self._groups, *([root] for root in self.roots(model).values())):
            inside = dict.fromkeys(id(parameter) for module in group for parameter in module.parameters())
            own = [left.pop(number) for number in inside if number in left]
            yield self.unit([names[id(module)] for module in group], group[0], own)

    def stored_bytes(self, parts: Sequence[Tensor]) -> int:
        return sum(-(-len(p) // self.dims.dp_shard) * p[0].nbytes for p in parts if len(p))

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
        for unit in (*self._groups, *([root] for root in self.roots(model).values())):
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
        """Let modules check that they are called with their own parameters, which FSDP sets.

        `torch.func.functional_call` sets others, which would not be used. Compiled code is not checked inside FSDP1's
        units.
        """
        super().wrap(model, find_unused)
        names = {id(module): original_name(name) for name, module in model.named_modules()}

        @torch.compiler.disable
        def check(places: list[Place], called: nn.Module, args: Any) -> None:
            for place in places:
                if not has_own_parameter(place):
                    name = f"{names[id(place[0])]}.{place[1]}".removeprefix(".")
                    raise ModelError(
                        f"{self.sharding}: {names[id(called)] or 'the root'} is called with another tensor as {name}, "
                        f"as by torch.func.functional_call, but {self.api} puts its own there; use sharding=ddp, or "
                        "sharding=root with sharding.api=fsdp2 and call a part of the model so."
                    )

        for module, places in places_of_parameters(model, inside=not self.config.compile):
            module.register_forward_pre_hook(partial(check, places), prepend=True)  # before FSDP's

    def explain(self, text: str, cause: BaseException, forward: bool) -> UserError | None:
        policy, param_dtype = self.config.reshard_after_forward.policy, self.config.precision.param_dtype
        if FREED in text or MIXED in text:
            remedy = "reshard_after_forward=never" if policy is not ReshardPolicy.never else "sharding=root"
            return ModelError(
                f"{self.sharding} reshard_after_forward={policy.name}: a tensor of a unit is used after its parameters "
                f"were freed{at(cause)}. FSDP2 gathers them again for tensors that a forward pass returns: return it "
                "as a tensor or in a container, .clone() a view, take gradients in a loss (torch.autograd.grad) after "
                f"all calls of the module, or use {remedy}."
            )
        if param_dtype is not Dtype.float32 and any(words in text for words in TYPES):
            return ModelError(
                f"precision.param_dtype={param_dtype.value}: {str(cause).rstrip('.')}{at(cause)}. {self.api} casts "
                f"parameters and inputs to {param_dtype.value}, and no buffers{_buffers(cause, self.model)} or what "
                "forward makes: cast these there, as buffer.to(x.dtype), or use precision=fp32 or sharding=ddp."
            )
        return None


def _buffers(error: BaseException, model: nn.Module) -> str:
    """Return the float32 buffers of the innermost running module that has some; "" if none has."""
    names = {id(module): original_name(name) for name, module in model.named_modules()}
    for frame, _ in reversed([*traceback.walk_tb(error.__traceback__)]):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and id(module) in names:
            own = [leaf for leaf, buffer in module.named_buffers(recurse=False) if buffer.dtype is torch.float32]
            if own:
                return f" (here {', '.join('.'.join(filter(None, (names[id(module)], leaf))) for leaf in own)})"
    return ""


def check_hooks(model: nn.Module, where: str, remedy: str) -> None:
    """Check that no parameter has a hook.

    Raises:
        ModelError: one has, and would lose it.
    """
    for name, parameter in model.named_parameters():
        if has_hooks(parameter):
            raise ModelError(
                f"{where}: the parameter {name} has a hook (register_hook or register_post_accumulate_grad_hook), "
                f"which would not be called: another parameter takes its place. Change the gradient in forward, or "
                f"{remedy}."
            )


def held_parameters(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the name of each parameter that something but its module holds, and the attribute that leads to it."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    own = {id(module) for module in model.modules()}
    seen = set(own)
    for path, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute != "_parameters" and not isinstance(module, nn.RNNBase):  # which updates what it holds
                for parameter in reached(value, seen, nn.Parameter):
                    if id(parameter) in names:
                        yield names[id(parameter)], f"{path or 'the model'}'s {attribute}"


def tensors_inside(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in containers and in the attributes of objects."""
    return (part for part in _objects(value) if isinstance(part, Tensor))


def _objects(value: Any) -> Iterator[Any]:
    left, seen = [value], dict[int, Any]()  # keeps the objects, or another could get the same id
    while left:
        one = left.pop()
        if id(one) not in seen:
            seen[id(one)] = one
            yield one
            left += reversed(_parts(one))


def _parts(value: Any) -> list[Any]:
    if isinstance(value, Tensor) or callable(value):
        return []
    return [part for _, part in parts_of(value)] or [*getattr(value, "__dict__", {}).values()]
