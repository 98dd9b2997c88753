"""How a trial divided its model among its ranks, as plain values: another script can divide the model by them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from fsdp_lab.config.axes.sharding import Granularity
from fsdp_lab.config.trial import TrialConfig

if TYPE_CHECKING:  # a report reads layouts without PyTorch
    from torch import nn

    from fsdp_lab.training.blocks import BlockClasses


class DividedLayers(NamedTuple):
    """How tensor parallelism divided layers: see `Layout`.

    Attributes:
        styles: as `Layout.tp_styles`.
        gathers: the names of the modules that gather the sequence.
        loss: whether the loss gets logits that are divided by the vocabulary.
    """

    styles: Mapping[str, str]
    gathers: Sequence[str]
    loss: bool


@dataclass(frozen=True)
class Unit:
    """The parameters that are gathered and reduced together. With tensor parallelism, of a rank's part of layers.

    Attributes:
        unit: the names of its modules; "": the root.
        count: how many equal units a row of a table stands for.
        module: the class of the first module.
        parameters: the number of elements.
        stored: the type that they are stored in.
        sharded: bytes that a rank stores of them, with padding.
        dtype: the type that they are gathered in.
        gathered: bytes of all parameters in that type; 0: each rank has them whole.
        weights: the names of the largest parameters.
        trained: the number of elements that get gradients; in a row, of all its units together.
    """

    unit: str
    count: int
    module: str
    parameters: int
    stored: str
    sharded: int
    dtype: str
    gathered: int
    weights: str
    trained: int


@dataclass(frozen=True)
class Layout:
    """The sharding units of a model and its blocks, by name.

    Attributes:
        units: names of the modules that are units, without the root; `*` stands for any number.
        last: names of the modules that share the unit after the last block, in the same form.
        blocks: names of the modules that activation checkpointing recomputes and compile compiles, in the same form.
        find_unused: whether some parameters may get no gradient.
        has_complex: whether some trained parameters are complex.
        tp_styles: PyTorch's style of each layer that tensor parallelism divides, as code, by pattern of names.
        tp_gathers: patterns of the modules that gather the sequence for their layers.
        divided_loss: whether the loss gets logits that are divided by the vocabulary.
        counts: whether the task's loss returned a sum and a count; before the first step False.
        block_classes: names of the classes of the blocks.
    """

    units: Sequence[str] = field(default_factory=list)
    blocks: Sequence[str] = field(default_factory=list)
    find_unused: bool = False
    has_complex: bool = False
    last: Sequence[str] = field(default_factory=list)
    tp_styles: Mapping[str, str] = field(default_factory=dict)
    tp_gathers: Sequence[str] = field(default_factory=list)
    divided_loss: bool = False
    counts: bool = False
    block_classes: Sequence[str] = field(default_factory=list)


def read_layout(values: Any) -> Layout | None:
    """Return the layout in a trial's facts; None if they are damaged."""
    try:
        return Layout(**values)
    except TypeError:
        return None


def matches(patterns: Sequence[str], name: str) -> bool:
    """Return whether a module's name is one of the patterns, in which `*` stands for a number."""
    return re.fullmatch("|".join(map(re.escape, patterns)).replace(r"\*", r"\d+"), name) is not None


def shortened(names: Sequence[str], all_names: Collection[str]) -> list[str]:
    """Return patterns that match only these of all names, with `*` in place of as many numbers as possible."""
    for count in range(max((len(re.findall(r"\d+", name)) for name in names), default=0), 0, -1):
        patterns = list(dict.fromkeys(re.sub(r"\d+", "*", name, count=count) for name in names))
        if {name for name in all_names if matches(patterns, name)} == set(names):
            return patterns
    return list(names)


def describe_layout(
    model: nn.Module,
    units: Sequence[nn.Module],
    blocks: BlockClasses,
    find_unused: bool = False,
    last: Sequence[nn.Module] = (),
    divided: DividedLayers | None = None,
) -> Layout:
    """Return how a model was divided.

    Args:
        units: as `sharding_units` returns them.
        find_unused: whether DDP looks for parameters without a gradient.
        last: as `last_unit` returns them.
        divided: as `Parallel.divide_layers` returns it.
    """
    names = {id(module): name for name, module in model.named_modules()}
    return Layout(
        units=shortened([names[id(unit)] for unit in units], list(names.values())),
        blocks=shortened([names[id(m)] for m in model.modules() if isinstance(m, blocks)], list(names.values())),
        find_unused=find_unused,
        has_complex=has_complex(model),
        last=shortened([names[id(module)] for module in last], list(names.values())),
        tp_styles=divided.styles if divided else {},
        tp_gathers=shortened(divided.gathers, list(names.values())) if divided else [],
        divided_loss=divided is not None and divided.loss,
        block_classes=[kind.__name__ for kind in blocks],
    )


def has_complex(model: nn.Module) -> bool:
    """Return whether an optimizer has to update complex numbers, which fused kernels cannot."""
    return any(parameter.is_complex() and parameter.requires_grad for parameter in model.parameters())


def unit_notes(layout: Layout, config: TrialConfig) -> list[str]:
    """Return a note if no module became a unit where the configuration asks for some; else an empty list."""
    granularity = config.sharding.granularity
    if layout.units or granularity in (Granularity.ddp, Granularity.root):
        return []
    return [
        f"sharding={granularity.name} found no module for a unit of its own, so all are gathered at once, as with "
        "sharding=root. What shares a parameter or a module with others is no unit."
    ]
