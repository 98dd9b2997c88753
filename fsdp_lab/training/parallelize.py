"""Sharding, precision, offload and resharding, applied to a model from outside.

The order is the one FSDP2 needs: activation checkpointing, compile, then `fully_shard` bottom-up, the root last. DDP
comes after the weights are loaded, because it has nothing to materialise.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel

from fsdp_lab.config.errors import ModelError
from fsdp_lab.config.parallel import (
    Api,
    Dtype,
    Embeddings,
    Granularity,
    OffloadConfig,
    OffloadTarget,
    PrecisionConfig,
    ReshardConfig,
    ReshardPolicy,
    ShardingConfig,
)
from fsdp_lab.config.training import ActivationCheckpointing
from fsdp_lab.config.trial import TrialConfig
from fsdp_lab.training.activation_checkpointing import check_no_unit_inside, checkpoint_blocks
from fsdp_lab.training.blocks import BlockClasses
from fsdp_lab.training.shardable import check_parameters, make_contiguous
from fsdp_lab.training.torch_private import one_post_forward_mesh
from fsdp_lab.training.unit_hooks import UnitHooks, call_by_methods

# PyTorch has another name for it since 2.15.
_DDP_KEYS = inspect.signature(DistributedDataParallel).parameters
_SYNC_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _DDP_KEYS else "broadcast_buffers": False
}
TORCH_DTYPE = {Dtype.float32: torch.float32, Dtype.bfloat16: torch.bfloat16, Dtype.float16: torch.float16}


def apply_to_blocks(
    model: nn.Module, block_classes: BlockClasses, units: Sequence[nn.Module], config: TrialConfig
) -> None:
    """Apply activation checkpointing, then compile, to every block, in place.

    Before that, let the methods `model.forward_methods` gather the units, and be recomputed where `forward` is.

    Args:
        units: the modules that are to become sharding units.

    Raises:
        ModelError: no module has such a method, or selective checkpointing of blocks with units inside.
    """
    blocks = [module for module in model.modules() if isinstance(module, block_classes)]
    checkpointing = config.activation_checkpointing
    if checkpointing is ActivationCheckpointing.selective:
        check_no_unit_inside(blocks, units)
    recomputed = blocks if checkpointing is not ActivationCheckpointing.none else []
    _apply_methods(model, [*units, *recomputed], config.model.forward_methods or ())
    checkpoint_blocks(blocks, config)
    if config.compile:
        torch.compiler.reset()  # code that an earlier trial of this process compiled, for any shape if it saw several
        # PyTorch keeps code on disk with the names of process groups in it, which are others in another mesh
        torch.compiler.config.force_disable_caches = config.sharding.tp > 1  # type: ignore[attr-defined]
        for block in blocks:
            block.compile()


def _apply_methods(model: nn.Module, modules: Sequence[nn.Module], names: Sequence[str]) -> None:
    for name in names:
        if not any(callable(getattr(type(module), name, None)) for module in model.modules()):
            raise ModelError(f"model.forward_methods=[{name}]: no module of the model has a method of that name.")
    for module in dict.fromkeys(modules):
        call_by_methods(module, names)


def apply_fully_shard(
    model: nn.Module, units: Sequence[nn.Module], config: TrialConfig, mesh: DeviceMesh, last: Sequence[nn.Module] = ()
) -> None:
    """Shard the model in place: the units bottom-up, then the root. `ddp` and FSDP1 wrap it once it has weights.

    Args:
        model: on `meta`.
        units: as `sharding_units` returns them.
        last: as `last_unit` returns them.

    Raises:
        UserError: see `check_parameters`.
    """
    if config.sharding.granularity is Granularity.ddp:
        check_parameters(model, [], config)
        return
    groups = in_groups(model, units, config.sharding.blocks_per_unit)
    ends = [[*last]] if last else []
    check_parameters(model, [*groups, *ends], config)
    make_contiguous(model)
    names = {id(module): name for name, module in model.named_modules()}
    for unit in units:
        UnitHooks(unit, names[id(unit)], config)  # before FSDP2's own hooks, which run after these
    if config.sharding.api is Api.fsdp1:
        return
    for module in last:
        UnitHooks(module, names[id(module)], config, kept_by_default=True)
    UnitHooks(model, type(model).__name__, config, kept_by_default=True)
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": mp_policy(config.precision),
        "offload_policy": offload_policy(config.offload),
        "reshard_after_forward": reshard_after_forward(config.reshard_after_forward),
    }
    with one_post_forward_mesh():
        for group in groups:
            fully_shard(group if len(group) > 1 else group[0], **options)
        for group in ends:
            fully_shard(group, **options | kept_by_default(config.reshard_after_forward))
        fully_shard(model, **options)
    if config.sharding.separate_reduce_scatter_group:
        assert isinstance(model, FSDPModule)
        model.set_separate_reduce_scatter_group()  # `config.machine` checks that this PyTorch has it
    if config.sharding.find_unused_parameters:
        assert isinstance(model, FSDPModule)
        model.set_reduce_scatter_unused_params(True)  # as above
    set_prefetch([group[0] for group in (*groups, *ends)], config.sharding)


def in_groups(model: nn.Module, units: Sequence[nn.Module], size: int) -> list[list[nn.Module]]:
    """Return the modules that share a unit, children before parents: `size` consecutive children of one module."""
    parents = {id(child): id(parent) for parent in model.modules() for child in parent.children()}
    of_parent: dict[int, list[nn.Module]] = {}
    for unit in units:
        of_parent.setdefault(parents[id(unit)], []).append(unit)
    groups = [children[i : i + size] for children in of_parent.values() for i in range(0, len(children), size)]
    place = {id(unit): i for i, unit in enumerate(units)}
    return sorted(groups, key=lambda group: place[id(group[-1])])


def sharding_units(model: nn.Module, block_classes: BlockClasses, sharding: ShardingConfig) -> list[nn.Module]:
    """Return the modules that become units of their own, children before parents, without the root.

    A module that shares a parameter or a module with another outside of it is no unit: what is tied belongs into one
    unit, the root.
    """
    return [unit for unit in _candidates(model, block_classes, sharding) if not _is_tied(model, unit)]


def _is_tied(model: nn.Module, unit: nn.Module) -> bool:
    own = {id(parameter) for parameter in unit.parameters()}
    seen, left = {unit}, [model]
    while left:
        module = left.pop()
        if module not in seen:  # without the unit itself, and what only it holds
            seen.add(module)
            left.extend(module.children())
            if any(id(parameter) in own for parameter in module.parameters(recurse=False)):
                return True
    return False


def _candidates(model: nn.Module, block_classes: BlockClasses, sharding: ShardingConfig) -> list[nn.Module]:
    match sharding.granularity:
        case Granularity.ddp | Granularity.root:
            return []
        case Granularity.per_block:
            outside = {*_before_and_after(model, block_classes)[0]} if sharding.embeddings is Embeddings.own else ()
            # one block may lie in another
            return [m for m in _bottom_up(model) if isinstance(m, block_classes) or m in outside]
        case Granularity.per_layer:
            return [m for m in _bottom_up(model) if _holds_parameters(m)]
        case Granularity.size_based:
            assert sharding.min_num_params is not None
            return _units_by_size(model, sharding.min_num_params)
        case _:
            raise ValueError(f"sharding.granularity={sharding.granularity} has no units")


def last_unit(model: nn.Module, block_classes: BlockClasses, sharding: ShardingConfig) -> list[nn.Module]:
    """Return the modules after the last block, which share one unit with `sharding.embeddings=own`: last norm and head.

    The backward pass starts with them, so `reshard_after_forward=default` keeps them gathered after the forward pass.
    """
    if sharding.embeddings is not Embeddings.own:
        return []
    return [module for module in _before_and_after(model, block_classes)[1] if not _is_tied(model, module)]


def _before_and_after(model: nn.Module, block_classes: BlockClasses) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the largest modules that hold no block and are in none: those before the last block, and those after."""
    holders = {m for m in model.modules() if any(isinstance(inner, block_classes) for inner in m.modules())}
    seen, outside, after = set[nn.Module](), list[nn.Module](), 0
    left = [*model.children()][::-1]
    while left:
        module = left.pop()
        if module in seen:
            continue
        seen.add(module)
        if isinstance(module, block_classes):
            after = len(outside)
        elif module in holders or type(module).forward is nn.Module.forward:  # a list is not called, but its parts are
            left.extend([*module.children()][::-1])
        elif any(True for _ in module.parameters()):
            outside.append(module)
    return outside[:after], outside[after:]


def _bottom_up(module: nn.Module) -> list[nn.Module]:
    """Return the descendants that are called, each once, in post-order.

    Lists of modules or parameters are not called, and attention reads its projection's weights itself: their hooks
    would never gather them.
    """
    if isinstance(module, nn.MultiheadAttention):
        return []
    descendants = dict.fromkeys(m for child in module.children() for m in (*_bottom_up(child), child))
    return [m for m in descendants if type(m).forward is not nn.Module.forward]


def _holds_parameters(module: nn.Module) -> bool:
    return isinstance(module, nn.MultiheadAttention) or any(True for _ in module.parameters(recurse=False))


def _units_by_size(model: nn.Module, min_num_params: int) -> list[nn.Module]:
    """Return the modules whose parameters, without those of inner units, reach the threshold."""
    taken: set[int] = set()
    units = []
    for module in _bottom_up(model):
        left = {id(p): p.numel() for p in module.parameters() if id(p) not in taken}
        if sum(left.values()) >= min_num_params:
            units.append(module)
            taken |= left.keys()
    return units


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


def apply_ddp(model: nn.Module, config: TrialConfig, device: torch.device, find_unused: bool = False) -> nn.Module:
    """Return the model wrapped by DDP, or unchanged for a sharded setting.

    Gradients are views of the reduction's buckets. A narrower `reduce_dtype` compresses them on the wire.

    Args:
        model: with its weights.
        find_unused: whether some parameters get no gradient, for which DDP would wait.
    """
    if config.sharding.granularity is not Granularity.ddp:
        return model
    model = DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        find_unused_parameters=find_unused,
        **_SYNC_BUFFERS,  # FSDP2 does not either: every sharding computes the same
    )
    hook = {Dtype.bfloat16: bf16_compress_hook, Dtype.float16: fp16_compress_hook}.get(config.precision.reduce_dtype)
    if hook is not None:
        model.register_comm_hook(None, hook)
    return model


def compute_precision(config: TrialConfig, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context of a forward pass: autocast for DDP. FSDP2 casts by its own policy."""
    param_dtype = config.precision.param_dtype
    if config.sharding.granularity is not Granularity.ddp or param_dtype is Dtype.float32:
        return nullcontext()
    return torch.autocast(device.type, dtype=TORCH_DTYPE[param_dtype])


@contextmanager
def float32_products(precision: PrecisionConfig, device: torch.device) -> Iterator[None]:
    """Multiply float32 matrices in TF32 inside, if the trial does: a setting of the process, which is restored."""
    if not precision.tf32 or device.type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def set_gradient_sync(model: nn.Module, is_last: bool, each: bool) -> None:
    """Set how the next backward pass reduces gradients: the last microbatch's does, and with `each` every one.

    Without, each rank keeps the gradients of the whole model. Hybrid sharding reduces those of earlier microbatches
    within a replica only: they are shards by then, and replicas add them up once a step.
    """
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = is_last or each  # what DDP's no_sync() sets, without the nesting
    elif isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last or each)
        model.set_requires_all_reduce(is_last)


def free_after_backward(units: Iterable[FSDPModule], frees: bool) -> None:
    """Set whether units of FSDP2 free parameters after a backward pass: not after one inside of a forward pass.

    The gradients that such a pass computes with a graph of their own, as of forces, need the parameters again, and no
    hook would gather them.
    """
    for unit in units:
        unit.set_reshard_after_backward(frees, recurse=False)
