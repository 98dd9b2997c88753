"""The repeating blocks of a model: `per_block` shards them, checkpointing recomputes them, compile compiles them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import nn

from fsdp_lab.config.axes.activation_offload import ActivationOffload
from fsdp_lab.config.axes.checkpointing import ActivationCheckpointing
from fsdp_lab.config.axes.sharding import Granularity
from fsdp_lab.config.errors import ModelError
from fsdp_lab.config.trial import TrialConfig
from fsdp_lab.config.wording import count
from fsdp_lab.memory.torch_private import unsplit_classes
from fsdp_lab.training.activation_checkpointing import check_no_unit_inside, checkpoint_blocks
from fsdp_lab.training.activation_offload import offload_blocks

_METHOD = "_fsdp_lab_method"  # an argument, so that a recomputation calls the same method
BlockClasses = tuple[type[nn.Module], ...]
BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)  # without communication between ranks


def find_block_classes(model: nn.Module) -> BlockClasses:
    """Return the classes of a model's repeating blocks.

    They are the classes that the model names itself, as models of transformers do; else the class of its longest list
    of equal modules. The tuple is empty without such a list.
    """
    named = unsplit_classes(model)
    classes = {type(module) for module in model.modules() if type(module).__name__ in named}
    if classes:
        return tuple(sorted(classes, key=lambda kind: kind.__name__))
    lists = [blocks for module in model.modules() if (blocks := _repeated(module))]
    return (type(max(lists, key=len)[0]),) if lists else ()


def _repeated(module: nn.Module) -> list[nn.Module]:
    """Return the children of a list of modules of one class, else nothing. PyTorch's own layers are no blocks."""
    children = list(module.children())
    kinds = {type(child) for child in children}
    if len(children) < 2 or len(kinds) > 1 or not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        return []
    if isinstance(module, nn.Sequential) and type(children[0]).__module__.startswith("torch.nn."):
        return []
    return children


def check_blocks(model: nn.Module, blocks: BlockClasses, config: TrialConfig) -> None:
    """Check that the model has the blocks that the config needs.

    Args:
        model: before it is sharded.
        blocks: the classes of its blocks; empty: none were found.

    Raises:
        ModelError: it has none of these classes, or fewer blocks than `activation_checkpointing_every`.
    """
    num_blocks = sum(isinstance(module, blocks) for module in model.modules())
    if num_blocks:
        _check_every(num_blocks, config)
        return
    checkpointing = config.activation_checkpointing
    needed_by = {
        "sharding=per_block": config.sharding.granularity is Granularity.per_block,
        f"activation_checkpointing={checkpointing.name}": checkpointing is not ActivationCheckpointing.none,
        "activation_offload=cpu": config.activation_offload is ActivationOffload.cpu,
        "compile=true": config.compile,
        "precision=float8": config.precision.float8,
    }
    for setting, needs in needed_by.items():
        if needs:
            known = (
                f"no module of class {', '.join(kind.__name__ for kind in blocks)}" if blocks else "no repeating block"
            )
            raise ModelError(
                f"{setting}: {type(model).__name__} has {known}. Name the class of its blocks with "
                "model.block_classes=[...], or use another setting."
            )


def _check_every(num_blocks: int, config: TrialConfig) -> None:
    every = config.activation_checkpointing_every
    if config.activation_checkpointing is ActivationCheckpointing.every_n and every > num_blocks:
        raise ModelError(
            f"activation_checkpointing_every={every} is more than the model's {count(num_blocks, 'block')}, so "
            f"activation_checkpointing=every_n would do nothing; use at most {num_blocks}."
        )


def loss_depends_on_dp_degree(model: nn.Module, scales_lr: bool) -> bool:
    """Return whether losses depend on how many parts a batch has: by dropout, batch norm or the learning rate."""
    draws = any("Dropout" in type(m).__name__ and getattr(m, "p", 0.0) > 0 for m in model.modules())
    return draws or scales_lr or bool(batch_norm_notes(model, 2))


def batch_norm_notes(model: nn.Module, dp_degree: int) -> list[str]:
    """Return a note about batch norm where ranks differ in samples; an empty list otherwise."""
    kinds = {type(m).__name__ for m in model.modules() if isinstance(m, BATCH_NORM)}
    if dp_degree == 1 or not kinds:
        return []
    return [
        f"{', '.join(sorted(kinds))} computes its statistics from each rank's part of the batch. Losses depend on the "
        "number of workers. val/loss, and the best epoch by it, is computed with each rank's own statistics, and the "
        "exported model has those of rank 0. nn.SyncBatchNorm shares them."
    ]


def apply_to_blocks(
    model: nn.Module, block_classes: BlockClasses, units: Sequence[nn.Module], config: TrialConfig
) -> None:
    """Apply activation checkpointing, then offloading of activations, then compile, to every block, in place.

    Before that, let the methods in `model.forward_methods` gather the units, and recompute them as `forward` is.

    Args:
        units: the modules that are to become sharding units.

    Raises:
        ModelError: no module has such a method, or selective checkpointing of blocks with units inside.
    """
    blocks = [module for module in model.modules() if isinstance(module, block_classes)]
    checkpointing = config.activation_checkpointing
    if checkpointing is ActivationCheckpointing.selective:
        check_no_unit_inside(blocks, units)
    offloads = config.activation_offload is not ActivationOffload.none
    changed = blocks if offloads or checkpointing is not ActivationCheckpointing.none else []
    _apply_methods(model, [*units, *changed], config.model.forward_methods or ())
    checkpoint_blocks(blocks, config)
    if offloads:  # around checkpointing, which saves only the inputs of a block
        offload_blocks(blocks, units)
    if config.compile:
        torch.compiler.reset()  # drops what earlier trials compiled, maybe for any shape
        # PyTorch caches code on disk with names of process groups, and another mesh has other names
        torch.compiler.config.force_disable_caches = config.sharding.tp > 1  # type: ignore[attr-defined]
        for block in blocks:
            block.compile()


def _apply_methods(model: nn.Module, modules: Sequence[nn.Module], names: Sequence[str]) -> None:
    for name in names:
        if not any(callable(getattr(type(module), name, None)) for module in model.modules()):
            raise ModelError(f"model.forward_methods=[{name}]: no module of the model has a method of that name.")
    for module in dict.fromkeys(modules):
        call_by_methods(module, names)


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
