"""Which blocks are recomputed in the backward pass, and which of their operators are not."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from fsdp_lab.config.errors import UserError
from fsdp_lab.config.training import MATRIX_PRODUCTS, SAVED_OPERATORS, ActivationCheckpointing
from fsdp_lab.config.trial import TrialConfig
from fsdp_lab.training.torch_private import checkpoint_wrapper


def checkpoint_blocks(blocks: Sequence[nn.Module], config: TrialConfig) -> list[nn.Module]:
    """Return for each block what takes its place: its wrapper, or the block where it is not recomputed."""
    match config.activation_checkpointing:
        case ActivationCheckpointing.none:
            return list(blocks)
        case ActivationCheckpointing.full:
            return [checkpoint_wrapper(block) for block in blocks]
        case ActivationCheckpointing.every_n:
            every = config.activation_checkpointing_every
            return [block if i % every else checkpoint_wrapper(block) for i, block in enumerate(blocks, 1)]
        case ActivationCheckpointing.selective:
            return [checkpoint_wrapper(block, context_fn=selective_contexts) for block in blocks]
        case _:
            raise ValueError(f"activation_checkpointing={config.activation_checkpointing} is not known")


def check_no_unit_inside(model: nn.Module, units: Sequence[nn.Module]) -> None:
    """
    Raises:
        UserError: a wrapped block has a sharding unit inside: its gathering would be counted among its operators.
    """
    wrapped = [module for module in model.modules() if hasattr(module, "checkpoint_fn")]
    inside = {id(module) for wrapper in wrapped for module in wrapper.modules() if module is not wrapper}
    if any(id(unit) in inside for unit in units):
        raise UserError(
            "activation_checkpointing=selective: a block has sharding units inside, and cannot be computed again then; "
            "name the outer blocks alone with model.block_classes=[...], or use activation_checkpointing=full."
        )


def selective_contexts() -> Any:
    """Return the contexts of the forward pass of a block and of its recomputation.

    torchtitan's rule: what is dear to compute is kept, and of matrix products every second one. A layer with a bias is
    `addmm`, which torchtitan's models have not: it counts as a matrix product here.
    """
    seen = {False: 0, True: 0}  # matrix products, of the forward pass and of the recomputation

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in _PRODUCTS:
            seen[ctx.is_recompute] += 1
            saved = seen[ctx.is_recompute] % 2 == 1
        else:
            saved = op in _SAVED
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _operators(names: Sequence[str]) -> frozenset[Any]:
    """Return the operators of these names below `torch.ops`, without those that this PyTorch does not have."""
    found = set()
    for name in names:
        with suppress(AttributeError):
            found.add(attrgetter(name)(torch.ops))
    return frozenset(found)


_PRODUCTS = _operators(MATRIX_PRODUCTS)
_SAVED = _operators(SAVED_OPERATORS)
