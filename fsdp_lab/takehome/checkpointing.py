"""The lines of a script for activation checkpointing."""

from __future__ import annotations

import json

from fsdp_lab.config.training import MATRIX_PRODUCTS, SAVED_OPERATORS, ActivationCheckpointing
from fsdp_lab.takehome.imports import Imports
from fsdp_lab.takehome.setup import Setup

WRAPPERS = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"


def checkpointing_lines(setup: Setup, imports: Imports, is_block: str) -> list[str]:
    """Return the lines that wrap the blocks of a model.

    Args:
        setup: the trial.
        imports: collects the imports of the script.
        is_block: the condition, as an expression, that `m` is a block.
    """
    mode, lines, check, more = setup.config.activation_checkpointing, [], f"lambda m: {is_block}", ""
    if mode is ActivationCheckpointing.none:
        return []
    if mode is ActivationCheckpointing.every_n:
        every = setup.config.activation_checkpointing_every
        lines.append(f"chosen = set([m for m in model.modules() if {is_block}][{every - 1} :: {every}])")
        check = "chosen.__contains__"
    if mode is ActivationCheckpointing.selective:
        lines += _selective(imports)
        imports.name("functools", "partial"), imports.name(WRAPPERS, "checkpoint_wrapper")
        more = "checkpoint_wrapper_fn=partial(checkpoint_wrapper, context_fn=contexts), "
    imports.name(WRAPPERS, "apply_activation_checkpointing")
    return [*lines, f"apply_activation_checkpointing(model, {more}check_fn={check})"]


def _selective(imports: Imports) -> list[str]:
    """Return the lines of the rule by operators."""
    checkpoint = "torch.utils.checkpoint"
    imports.name(checkpoint, "CheckpointPolicy"), imports.name(checkpoint, "create_selective_checkpoint_contexts")
    aten = [name.split(".")[1] for name in SAVED_OPERATORS if name.startswith("aten.") and name not in MATRIX_PRODUCTS]
    others = [f"torch.ops.{name}" for name in SAVED_OPERATORS if not name.startswith("aten.")]
    return [
        f"products = {{{', '.join(f'torch.ops.{name}' for name in MATRIX_PRODUCTS)}}}",
        f"saved = {json.dumps(aten)}",
        f"saved = {{{', '.join(others)}, *(getattr(torch.ops.aten, name).default for name in saved)}}",
        "def contexts():",
        "    seen = {False: 0, True: 0}",
        "    def policy(ctx, op, *args, **kwargs):",
        "        seen[ctx.is_recompute] += op in products",
        "        keeps = seen[ctx.is_recompute] % 2 == 1 if op in products else op in saved  # every second product",
        "        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE",
        "    return create_selective_checkpoint_contexts(policy)",
    ]
