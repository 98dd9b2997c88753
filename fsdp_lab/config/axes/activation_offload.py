"""`activation_offload`: where activations that a block saves for its backward pass are kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from fsdp_lab.config.axes.base import Axis, Where, refuse
from fsdp_lab.config.axes.checkpointing import ActivationCheckpointing
from fsdp_lab.config.key import key
from fsdp_lab.machine.hardware import pytorch_version

if TYPE_CHECKING:
    from fsdp_lab.config.ranks import Ranks
    from fsdp_lab.config.trial import TrialConfig

SMALLEST = 1024  # bytes that are moved, as in torchtune and trl


class ActivationOffload(Enum):
    """Where activations that blocks save are kept until the backward pass: on the device, or in pinned host memory."""

    none = "none"
    cpu = "cpu"


@dataclass
class ActivationOffloadKeys:
    activation_offload: ActivationOffload = key(ActivationOffload.none)
    """Where activations that blocks save for the backward pass are kept: on the device, or in pinned host memory
    (`cpu`). Recomputed blocks save only their inputs."""


def _check(trial: TrialConfig, ranks: Ranks) -> None:
    if trial.activation_offload is ActivationOffload.none:
        return
    selective = trial.activation_checkpointing is ActivationCheckpointing.selective
    refused = {
        "compile=true": (trial.compile, "hooks that copy tensors would cut a block's code apart; use compile=false"),
        "activation_checkpointing=selective": (
            selective and pytorch_version() < (2, 15),
            "before PyTorch 2.15 what it saves stays on the device; use activation_checkpointing=full",
        ),
    }
    refuse("activation_offload=cpu", refused, ", or activation_offload=none.")


def _notes(trial: TrialConfig, where: Where) -> Iterator[str]:
    if trial.activation_offload is ActivationOffload.cpu and not where.cuda:
        yield (
            "activation_offload=cpu saves no memory on a CPU: what blocks save is copied to the memory in which it is "
            "already, and nothing is pinned."
        )


AXIS = Axis(("activation_offload",), plain="none", check=_check, notes=_notes)
