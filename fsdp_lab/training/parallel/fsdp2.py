"""FSDP2: `fully_shard` on the units of a model, children before parents, then on the root."""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from linecache import getline
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.multiprocessing.reductions import StorageWeakRef

from fsdp_lab.config.axes.offload import OffloadTarget
from fsdp_lab.config.axes.precision import Dtype, PrecisionConfig
from fsdp_lab.config.axes.reshard import ReshardPolicy
from fsdp_lab.config.errors import ModelError, UserError
from fsdp_lab.config.trial import TrialConfig
from fsdp_lab.memory.torch_private import REBUILDS_INPUTS, gather_before_gradient_of, one_post_forward_mesh
from fsdp_lab.training.parallel.base import MIXED, at
from fsdp_lab.training.parallel.sharded import ContainerHooks, Sharded, tensors_inside
from fsdp_lab.workloads.base import original_name

# None frees the blocks and keeps the root.
_RESHARDS = {ReshardPolicy.always: True, ReshardPolicy.never: False, ReshardPolicy.default: None}
_CHAIN = re.compile(r"[A-Za-z_]\w*(?:\.\w+|\[\d+\])*")  # such as self.blocks[0].weight
_OF_EVERY_MODULE = vars(nn.Module()).keys()


class UnitHooks(ContainerHooks):
    """Gathers the parameters of a unit before its backward pass, whatever the unit returns or keeps.

    FSDP2 gathers them before the gradient of a tensor that it found in the output. It looks into tuples, lists and
    dictionaries, and since PyTorch 2.15 into dataclasses, but not into other objects or attributes of modules. A view
    that is changed in place loses its hook, so its base gets one, too.

    Args:
        config: whether parameters are freed after the forward pass, too.
        kept_by_default: whether `reshard_after_forward=default` keeps its parameters, as it does the root's.
    """

    def __init__(self, unit: nn.Module, name: str, config: TrialConfig, *, kept_by_default: bool = False) -> None:
        super().__init__(unit, name, config)
        keeps = (ReshardPolicy.never, ReshardPolicy.default) if kept_by_default else (ReshardPolicy.never,)
        self._frees = config.reshard_after_forward.policy not in keeps
        self._keepers: dict[tuple[nn.Module, str], None] = {}  # attributes with tensors
        self._looks = 2  # search only so many forward passes for what they keep: it takes long

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


class FSDP2(Sharded):
    """`fully_shard`."""

    hooks: ClassVar[type[ContainerHooks]] = UnitHooks
    one_type: ClassVar[str] = "FSDP2 reduces the gradients of a unit"
    model: Any  # an `FSDPModule`, or with `task.step` its parts are

    def divide(self, model: nn.Module, units: Sequence[nn.Module], last: Sequence[nn.Module]) -> None:
        super().divide(model, units, last)
        config, reshard = self.config, self.config.reshard_after_forward
        names = {id(module): name for name, module in model.named_modules()}
        for module in last:
            UnitHooks(module, names[id(module)], config, kept_by_default=True)
        roots: dict[str, Any] = self.roots(model)
        for name, root in roots.items():
            UnitHooks(root, name or type(model).__name__, config, kept_by_default=True)
        target = config.offload.target
        pins = target is OffloadTarget.cpu and torch.cuda.is_available()  # without, there is no pinned memory
        options: dict[str, Any] = {
            "mesh": self.dims.mesh,
            "mp_policy": mp_policy(config.precision),
            "offload_policy": OffloadPolicy() if target is OffloadTarget.none else CPUOffloadPolicy(pin_memory=pins),
            "reshard_after_forward": _RESHARDS.get(reshard.policy, reshard.size),
        }
        kept = {"reshard_after_forward": False} if reshard.policy is ReshardPolicy.default else {}
        with one_post_forward_mesh():
            for group in self._groups:
                starts = bool(last) and group is self._groups[-1]  # the backward pass starts with it
                fully_shard([*group] if len(group) > 1 else group[0], **options | (kept if starts else {}))
            for root in roots.values():
                fully_shard(root, **options)
        for sharded in roots.values():  # each an `FSDPModule` since then
            if config.sharding.separate_reduce_scatter_group:
                sharded.set_separate_reduce_scatter_group()  # `config.machine` checks that this PyTorch has it
            if config.sharding.find_unused_parameters:
                sharded.set_reduce_scatter_unused_params(True)  # as above
        self._set_prefetch()

    def _set_prefetch(self) -> None:
        """Gather the next units while one computes: forwards in order, backwards in reverse."""
        ahead, behind = self.config.sharding.forward_prefetch, self.config.sharding.backward_prefetch
        units: list[Any] = [group[0] for group in self._groups]
        for i, unit in enumerate(units):
            if ahead is not None:
                unit.set_modules_to_forward_prefetch(units[i + 1 : i + 1 + ahead])
            if behind is not None:
                unit.set_modules_to_backward_prefetch(units[max(0, i - behind) : i][::-1])

    def wrap(self, model: nn.Module, find_unused: bool) -> None:
        super().wrap(model, find_unused)
        self._modules = [module for module in model.modules() if isinstance(module, FSDPModule)]

    @contextmanager
    def microbatch(self, is_last: bool) -> Iterator[None]:
        """Set how the next backward pass reduces gradients.

        Without reduction, each rank keeps the gradients of the whole model. Hybrid sharding reduces those of earlier
        microbatches within a replica only: they are shards by then, and replicas add them up once a step.

        Inside, units free no parameters after a backward pass. A forward pass may compute gradients with a graph, as of
        forces. These need the parameters again, and no hook would gather them.
        """
        training = self.config.training
        # not with `task.step`: parts that the last microbatch's loss does not use would not be reduced
        if training.grad_accum_steps > 1 and self.config.task.step is None:  # these calls walk through the whole model
            self.model.set_requires_gradient_sync(is_last or training.sync_each_microbatch)
            self.model.set_requires_all_reduce(is_last)
        self._free_after_backward(False)
        yield
        self._free_after_backward(True)

    def explain(self, text: str, cause: BaseException, forward: bool) -> UserError | None:
        if not (forward and MIXED in text):
            return super().explain(text, cause, forward)
        name = _parameter_named(cause, self.model)
        here = f"{at(cause)}{f', here {name}' if name else ''}"
        if name and self._at_work(cause, name):
            return ModelError(
                f"{self.sharding}: the weights of a unit were freed during its forward pass{here}, for example by "
                "a gradient that is taken inside it (torch.autograd.grad): take it in task.loss, of what the model "
                "returns, or use sharding=root."
            )
        return ModelError(
            f"{self.sharding}: a weight of a unit is used outside of it{here}, but FSDP2 gathers the weights of a unit "
            "for its forward pass only; name a method that uses them with model.forward_methods=[...], call the module "
            "that holds the weight, or use a coarser sharding, such as root."
        )

    def _at_work(self, error: BaseException, parameter: str) -> bool:
        """Return whether the unit of a parameter was in its forward pass when an error was raised."""
        named = self.model.named_modules()
        units = {f"{original_name(name)}.": module for name, module in named if isinstance(module, FSDPModule)}
        of_unit = [unit for name, unit in units.items() if name == "." or parameter.startswith(name)]
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        return any(f.f_code.co_name == "forward" and f.f_locals.get("self") is of_unit[-1] for f in frames)

    def reshard(self) -> None:
        for module in self._modules:
            module.reshard()

    def _free_after_backward(self, frees: bool) -> None:
        for module in self._modules:
            module.set_reshard_after_backward(frees, recurse=False)

    def place(self, model: nn.Module) -> None:
        """Do nothing: each unit was moved when it was sharded."""

    def shard_to_draw(self) -> int:
        if self.home.type != "cpu":
            return 0
        warnings.filterwarnings("ignore", "DTensor random operators may not have complete support")
        return self.dims.dp_rank % self.dims.dp_shard


def mp_policy(precision: PrecisionConfig) -> MixedPrecisionPolicy:
    """Return FSDP2's precision policy: float32 keeps the dtypes of parameters and inputs, as DDP does.

    `reduce_dtype=None` differs between PyTorch versions: 2.11 reduces in the compute dtype, 2.15 in the parameters'.
    So it is explicit wherever these are not the same.
    """
    kept, reduces = precision.param_dtype is Dtype.float32, precision.reduce_dtype
    return MixedPrecisionPolicy(
        param_dtype=None if kept else getattr(torch, precision.param_dtype.value),
        reduce_dtype=None if kept and reduces is Dtype.float32 else getattr(torch, reduces.value),
    )


def _parameter_named(error: BaseException, model: nn.Module) -> str:
    """Return the name of the parameter that the line which raised an error names; "" if none."""
    names = {id(parameter): original_name(name) for name, parameter in model.named_parameters()}
    for frame, number in reversed([*traceback.walk_tb(error.__traceback__)]):
        for words in _CHAIN.findall(getline(frame.f_code.co_filename, number)):
            first, *rest = re.findall(r"\w+", words)
            value = frame.f_locals.get(first)
            for word in rest:
                if isinstance(value, nn.Module):
                    value = getattr(value, word, None)
            if id(value) in names:
                return names[id(value)]
    return ""


def _storage(tensor: Tensor) -> StorageWeakRef | None:
    return StorageWeakRef(tensor.untyped_storage()) if tensor.layout is torch.strided else None
