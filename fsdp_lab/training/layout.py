"""The layout of a model that was just sharded."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fsdp_lab.layout import Layout, shortened
from fsdp_lab.training.blocks import BlockClasses
from fsdp_lab.training.torch_private import WRAPPED
from fsdp_lab.workloads.base import plain_class


def describe_layout(
    model: nn.Module, units: Sequence[nn.Module], blocks: BlockClasses, find_unused: bool = False
) -> Layout:
    """Return how a model was divided.

    Args:
        model: sharded.
        units: the modules that `apply_fully_shard` sharded, without the root.
        blocks: the classes of the repeating blocks.
        find_unused: whether DDP looks for parameters without a gradient.
    """
    names = {id(module): name.replace(f".{WRAPPED}", "") for name, module in model.named_modules()}
    ours = {id(unit) for unit in units}
    kinds = tuple(dict.fromkeys(plain_class(unwrapped(unit)) for unit in units))
    alike = {
        id(module)
        for name, module in model.named_modules()
        if name and not name.endswith(WRAPPED) and isinstance(unwrapped(module), kinds)
    }
    return Layout(
        units=shortened([names[id(unit)] for unit in units], list(names.values())),
        unit_classes=[path_of(kind) for kind in kinds] if alike == ours else [],
        block_classes=[path_of(kind) for kind in blocks],
        find_unused=find_unused,
    )


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module that activation checkpointing wrapped, or the module itself."""
    return getattr(module, WRAPPED, module)


def path_of(kind: type) -> str:
    """Return the path of a class as `module:Name`."""
    return f"{kind.__module__}:{kind.__qualname__}"
