"""The layout of a model that was just sharded."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fsdp_lab.config.parallel import Granularity
from fsdp_lab.config.trial import TrialConfig
from fsdp_lab.layout import Layout, shortened
from fsdp_lab.training.blocks import BlockClasses
from fsdp_lab.training.shardable import has_complex
from fsdp_lab.training.torch_private import without_wrappers


def describe_layout(
    model: nn.Module, units: Sequence[nn.Module], blocks: BlockClasses, find_unused: bool = False
) -> Layout:
    """Return how a model was divided.

    Args:
        units: the modules that `apply_fully_shard` sharded, without the root.
        find_unused: whether DDP looks for parameters without a gradient.
    """
    names = {id(module): without_wrappers(name) for name, module in model.named_modules()}
    return Layout(
        units=shortened([names[id(unit)] for unit in units], list(names.values())),
        blocks=shortened([names[id(m)] for m in model.modules() if isinstance(m, blocks)], list(names.values())),
        find_unused=find_unused,
        has_complex=has_complex(model),
    )


def unit_notes(layout: Layout, config: TrialConfig) -> list[str]:
    """Return a note if no module became a unit where the configuration asks for some; else an empty list."""
    granularity = config.sharding.granularity
    if layout.units or granularity in (Granularity.ddp, Granularity.root):
        return []
    return [
        f"sharding={granularity.name} found no module for a unit of its own, so all are gathered at once, as with "
        "sharding=root. What shares a parameter or a module with others is no unit."
    ]
