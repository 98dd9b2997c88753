"""Which blocks are recomputed in the backward pass, and which outputs of their operators are saved."""

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
    """Return the replacement of each block: its wrapper, or the block itself if it is not recomputed."""
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
    """Check that no wrapped block has a sharding unit inside, whose gathering would count among its operators.

    Raises:
        UserError: a block has one.
    """
    wrapped = [module for module in model.modules() if hasattr(module, "checkpoint_fn")]
    inside = {id(module) for wrapper in wrapped for module in wrapper.modules() if module is not wrapper}
    if any(id(unit) in inside for unit in units):
        raise UserError(
            "activation_checkpointing=selective: a block has sharding units inside, so it cannot be recomputed; name "
            "only the outer blocks with model.block_classes=[...], or use activation_checkpointing=full."
        )


def selective_contexts() -> Any:
    """Return the contexts of a block's forward pass and of its recomputation.

    By torchtitan's rule the outputs of expensive operators are saved, and of matrix products every second one. A layer
    with a bias is `addmm`, which torchtitan's models lack; it counts as a matrix product here.
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
    """Return the operators of these names below `torch.ops`; names that this PyTorch lacks are skipped."""
    operators = set()
    for name in names:
        with suppress(AttributeError):
            operators.add(attrgetter(name)(torch.ops))
    return frozenset(operators)


_PRODUCTS = _operators(MATRIX_PRODUCTS)
_SAVED = _operators(SAVED_OPERATORS)
