"""Which modules of a model become sharding units."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fsdp_lab.config.axes.embeddings import Embeddings
from fsdp_lab.config.axes.sharding import Granularity
from fsdp_lab.config.trial import ShardingConfig
from fsdp_lab.training.blocks import BlockClasses


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

    A module that shares a parameter or a module with another outside of it is no unit: tied parameters belong to one
    unit, the root.
    """
    return [unit for unit in _candidates(model, block_classes, sharding) if not _is_tied(model, unit)]


def _is_tied(model: nn.Module, unit: nn.Module) -> bool:
    own = {id(parameter) for parameter in unit.parameters()}
    seen, left = {unit}, [model]
    while left:
        module = left.pop()
        if module not in seen:  # without the unit itself, and modules that only it holds
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
            # one block may be inside another
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

    Lists of modules or parameters are not called, and attention reads its projection's weights itself. So hooks on them
    would never gather.
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
