"""FSDP2: `fully_shard` on the units of a model, children before parents, then on the root."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from fsdp_lab.config.parallel import (
    Dtype,
    OffloadConfig,
    OffloadTarget,
    PrecisionConfig,
    ReshardConfig,
    ReshardPolicy,
    ShardingConfig,
)
from fsdp_lab.training.explain import MIXED, at, parameter_named
from fsdp_lab.training.parallel.sharded import Sharded
from fsdp_lab.training.precision import TORCH_DTYPE
from fsdp_lab.training.torch_private import one_post_forward_mesh
from fsdp_lab.training.unit_hooks import ContainerHooks, UnitHooks
from fsdp_lab.workloads.base import original_name


class FSDP2(Sharded):
    """`fully_shard`."""

    hooks: ClassVar[type[ContainerHooks]] = UnitHooks

    def divide(self, model: nn.Module, units: Sequence[nn.Module], last: Sequence[nn.Module]) -> None:
        """Shard the model, which is on `meta`, in place."""
        super().divide(model, units, last)
        config = self.config
        names = {id(module): name for name, module in model.named_modules()}
        for module in last:
            UnitHooks(module, names[id(module)], config, kept_by_default=True)
        UnitHooks(model, type(model).__name__, config, kept_by_default=True)
        options: dict[str, Any] = {
            "mesh": self.dims.mesh,
            "mp_policy": mp_policy(config.precision),
            "offload_policy": offload_policy(config.offload),
            "reshard_after_forward": reshard_after_forward(config.reshard_after_forward),
        }
        groups, ends = (self._groups[:-1], self._groups[-1:]) if last else (self._groups, ())
        with one_post_forward_mesh():
            for group in groups:
                fully_shard([*group] if len(group) > 1 else group[0], **options)
            for group in ends:
                fully_shard([*group], **options | kept_by_default(config.reshard_after_forward))
            fully_shard(model, **options)
        if config.sharding.separate_reduce_scatter_group:
            assert isinstance(model, FSDPModule)
            model.set_separate_reduce_scatter_group()  # `config.machine` checks that this PyTorch has it
        if config.sharding.find_unused_parameters:
            assert isinstance(model, FSDPModule)
            model.set_reduce_scatter_unused_params(True)  # as above
        set_prefetch([group[0] for group in self._groups], config.sharding)

    def wrap(self, model: nn.Module, find_unused: bool) -> None:
        """Take the sharded model as it is."""
        super().wrap(model, find_unused)
        self._modules = [module for module in model.modules() if isinstance(module, FSDPModule)]

    @contextmanager
    def microbatch(self, is_last: bool) -> Iterator[None]:
        """Set how the next backward pass reduces gradients.

        Without reduction, each rank keeps the gradients of the whole model. Hybrid sharding reduces those of earlier
        microbatches within a replica only: they are shards by then, and replicas add them up once a step.

        Units free no parameters after a backward pass inside: the gradients that such a pass computes with a graph of
        their own, as of forces, need the parameters again, and no hook would gather them.
        """
        if self.config.training.grad_accum_steps > 1:  # it walks through the whole model
            assert isinstance(self.model, FSDPModule)
            self.model.set_requires_gradient_sync(is_last or self.config.training.sync_each_microbatch)
            self.model.set_requires_all_reduce(is_last)
        self._free_after_backward(False)
        yield
        self._free_after_backward(True)

    def _why(self, text: str, cause: BaseException, forward: bool) -> str | None:
        if not (forward and MIXED in text):
            return super()._why(text, cause, forward)
        name = parameter_named(cause, self.model)
        here = f"{at(cause)}{f', here {name}' if name else ''}"
        if name and self._at_work(cause, name):
            return (
                f"{self.sharding}: the weights of a unit were freed during its forward pass{here}, as a gradient does "
                "that is taken inside of it (torch.autograd.grad): take it in task.loss, of what the model returns, or "
                "use sharding=root."
            )
        return (
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
        """Return the number of this rank's shard: on a CPU PyTorch does not draw it from its place in the whole."""
        if self.home.type != "cpu":
            return 0
        warnings.filterwarnings("ignore", "DTensor random operators may not have complete support")
        return self.dims.dp_rank % self.dims.dp_shard


def mp_policy(precision: PrecisionConfig) -> MixedPrecisionPolicy:
    """Return FSDP2's precision policy: float32 keeps the dtypes of parameters and inputs, as DDP does.

    `reduce_dtype=None` differs between PyTorch versions: 2.11 reduces in the compute dtype, 2.15 in the parameters'.
    So it is explicit wherever these are not the same.
    """
    kept = precision.param_dtype is Dtype.float32
    return MixedPrecisionPolicy(
        param_dtype=None if kept else TORCH_DTYPE[precision.param_dtype],
        reduce_dtype=None if kept and precision.reduce_dtype is Dtype.float32 else TORCH_DTYPE[precision.reduce_dtype],
    )


def offload_policy(offload: OffloadConfig) -> OffloadPolicy:
    """Return FSDP2's offload policy. Pinned memory needs CUDA; without it `cpu` and `cpu_unpinned` are the same."""
    if offload.target is OffloadTarget.none:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=offload.target is OffloadTarget.cpu and torch.cuda.is_available())


def reshard_after_forward(reshard: ReshardConfig) -> bool | int | None:
    """Return FSDP2's argument of that name; `None` frees the blocks and keeps the root."""
    match reshard.policy:
        case ReshardPolicy.always:
            return True
        case ReshardPolicy.never:
            return False
        case ReshardPolicy.default:
            return None
        case ReshardPolicy.to_size:
            return reshard.size


def kept_by_default(reshard: ReshardConfig) -> dict[str, bool]:
    """Return the argument of `fully_shard` for a unit with which the backward pass starts, if it differs."""
    return {"reshard_after_forward": False} if reshard.policy is ReshardPolicy.default else {}


def set_prefetch(units: list[nn.Module], sharding: ShardingConfig) -> None:
    """Gather the next units while one computes: forwards in order, backwards in reverse.

    Any module of a unit of several modules stands for it.
    """
    ahead, behind = sharding.forward_prefetch, sharding.backward_prefetch
    for i, unit in enumerate(units):
        assert isinstance(unit, FSDPModule)
        if ahead is not None:
            unit.set_modules_to_forward_prefetch(units[i + 1 : i + 1 + ahead])  # type: ignore[arg-type]
        if behind is not None:
            unit.set_modules_to_backward_prefetch(units[max(0, i - behind) : i][::-1])  # type: ignore[arg-type]
