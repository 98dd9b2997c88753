"""What a sharding unit returns, keeps and changes, seen by hooks: FSDP2 looks into few kinds of objects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from fsdp_lab.config.errors import ModelError
from fsdp_lab.config.parallel import Dtype, ReshardPolicy
from fsdp_lab.config.trial import TrialConfig
from fsdp_lab.training.torch_private import (
    REBUILDS_INPUTS,
    gather_before_gradient_of,
)
from fsdp_lab.workloads.base import parts_of

_METHOD = "_fsdp_lab_method"  # an argument, so that a recomputation chooses the same
_OF_EVERY_MODULE = vars(nn.Module()).keys()


class ContainerHooks:
    """Checks that a unit changes no list or dictionary that it gets, of which FSDP hands it a copy.

    Args:
        unit: before it is sharded: FSDP's own hooks run after these.
        name: for messages.
        config: whether inputs are cast.
    """

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


class UnitHooks(ContainerHooks):
    """Lets the backward pass of a unit begin with its parameters gathered, whatever the unit returns or keeps.

    FSDP2 gathers them before the gradient of a tensor that it found in the output. It looks into tuples, lists and
    dictionaries, since PyTorch 2.15 into dataclasses, and not into other objects or attributes of modules. A view that
    is changed in place loses its hook, so its base gets one, too.

    Args:
        config: whether parameters are freed after the forward pass, too.
        kept_by_default: whether `reshard_after_forward=default` keeps its parameters, as it does the root's.
    """

    def __init__(self, unit: nn.Module, name: str, config: TrialConfig, *, kept_by_default: bool = False) -> None:
        super().__init__(unit, name, config)
        keeps = (ReshardPolicy.never, ReshardPolicy.default) if kept_by_default else (ReshardPolicy.never,)
        self._frees = config.reshard_after_forward.policy not in keeps
        self._keepers: dict[tuple[nn.Module, str], None] = {}  # attributes with tensors
        self._looks = 2  # forward passes that are looked into for what they keep: it takes long

    def copies(self, given: Any) -> bool:
        return self._casts or REBUILDS_INPUTS or any(tensor.requires_grad for tensor in tensors_inside(given))

    @torch.compiler.disable
    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Look at what the unit returns and keeps, too.

        Raises:
            ModelError: it returns or keeps a view of a parameter that is freed, or has changed a copy.
        """
        super().leave(module, args, output)
        if not torch.is_grad_enabled():
            return
        if looks := self._looks > 0:
            self._looks -= 1
            self._keepers |= dict.fromkeys(self._find_keepers())
        kept = {f"keeps in {name}": tensors_inside(getattr(m, name, None)) for m, name in self._keepers}
        for how, tensors in {"returns": tensors_inside(output), **kept}.items():
            for tensor in tensors:
                if looks and self._frees:
                    self._check_view(how, tensor)
                gather_before_gradient_of(tensor, module)

    def _find_keepers(self) -> list[tuple[nn.Module, str]]:
        return [
            (module, name)
            for module in self._unit.modules()
            for name, value in vars(module).items()
            if not (isinstance(module, nn.RNNBase) and name == "_flat_weights")  # its parameters, whatever these are
            and name not in _OF_EVERY_MODULE
            and not name.startswith("__")
            and any(True for _ in tensors_inside(value))
        ]

    def _check_view(self, how: str, tensor: Tensor) -> None:
        storage = _storage(tensor)
        for name, parameter in self._unit.named_parameters():
            if storage is not None and storage == _storage(parameter):
                raise ModelError(
                    f"{self._name} {how} a view of its parameter {name}, which FSDP2 frees after the forward pass; use "
                    "its .clone(), reshard_after_forward=never, or sharding=ddp."
                )


def tensors_inside(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in containers and in the attributes of objects."""
    return (part for part in _objects(value) if isinstance(part, Tensor))


def _objects(value: Any) -> Iterator[Any]:
    left, seen = [value], dict[int, Any]()  # which keeps what it has seen, or its number might be another's
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


def _storage(tensor: Tensor) -> StorageWeakRef | None:
    return StorageWeakRef(tensor.untyped_storage()) if tensor.layout is torch.strided else None


def call_by_methods(module: nn.Module, names: Sequence[str]) -> None:
    """Let other methods of a module than `forward` run its hooks, which gather its parameters.

    Args:
        names: of methods; those that the module lacks are skipped.
    """
    own = {name: method for name in names if callable(method := getattr(module, name, None))}
    forward, at_work = module.forward, list[str]()

    @wraps(forward)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        name = kwargs.pop(_METHOD, "")
        at_work.append(name)
        try:
            return own.get(name, forward)(*args, **kwargs)
        finally:
            at_work.pop()

    def called(name: str, *args: Any, **kwargs: Any) -> Any:
        return own[name](*args, **kwargs) if at_work else module(*args, **kwargs, **{_METHOD: name})

    if own:
        module.forward = chosen
        for name, method in own.items():
            setattr(module, name, wraps(method)(partial(called, name)))
