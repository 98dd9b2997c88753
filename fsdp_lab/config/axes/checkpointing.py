"""`activation_checkpointing`: which blocks are recomputed in the backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from fsdp_lab.config.axes.base import Axis
from fsdp_lab.config.errors import CombinationError
from fsdp_lab.config.key import at_least_one, key

if TYPE_CHECKING:
    from fsdp_lab.config.ranks import Ranks
    from fsdp_lab.config.trial import TrialConfig


class ActivationCheckpointing(Enum):
    """Which blocks are recomputed in the backward pass.

    All (`full`), every n-th (`every_n`), or all but the outputs of some operators (`selective`).
    """

    none = "none"
    full = "full"
    every_n = "every_n"
    selective = "selective"


@dataclass
class CheckpointingKeys:
    activation_checkpointing: ActivationCheckpointing = key(ActivationCheckpointing.none)
    """Blocks to recompute in the backward pass: none, all (`full`), every n-th, or all but the outputs of some
    operators (`selective`)."""
    activation_checkpointing_every: int = key(2, at_least_one)
    """The n of `activation_checkpointing=every_n`."""


def _check(trial: TrialConfig, ranks: Ranks) -> None:
    # PyTorch compares a block's operators in the forward pass with those in its recomputation. A unit inside the block
    # gathers only in the forward pass.
    granularity = trial.sharding.granularity.name
    inside = granularity in ("per_layer", "size_based")
    if inside and trial.activation_checkpointing is ActivationCheckpointing.selective:
        raise CombinationError(
            f"sharding={granularity} with activation_checkpointing=selective: it cannot recompute a block "
            "that contains sharding units; use sharding=per_block, root or ddp, or activation_checkpointing=full.",
        )


def _effective(trial: TrialConfig, ranks: Ranks) -> dict[str, Any]:
    """Return the mode and its n, which only `every_n` uses; `every_n` with n=1 is `full`."""
    mode, every = trial.activation_checkpointing, trial.activation_checkpointing_every
    if mode is ActivationCheckpointing.every_n and every == 1:
        mode = ActivationCheckpointing.full
    counts = mode is ActivationCheckpointing.every_n
    return {"activation_checkpointing": mode.name, "activation_checkpointing_every": every if counts else None}


AXIS = Axis(
    ("activation_checkpointing", "activation_checkpointing_every"),
    plain="none",
    divides=True,
    check=_check,
    effective=_effective,
)
