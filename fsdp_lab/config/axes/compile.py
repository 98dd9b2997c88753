"""`compile`: each block, and the loss of tokens, by torch.compile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fsdp_lab.config.axes.base import Axis, Where
from fsdp_lab.config.key import key

if TYPE_CHECKING:
    from fsdp_lab.config.ranks import Ranks
    from fsdp_lab.config.trial import TrialConfig


@dataclass
class CompileKeys:
    compile: bool = key(False)
    """Compile each block with torch.compile."""
    compile_loss: bool = key(True)
    """With `compile`, also compile the loss of `language` and `seq2seq`, which then copies no logits to float32."""


def compiles_loss(trial: TrialConfig) -> bool:
    """Return whether the loss is compiled: only a loss of tokens, from all logits at once."""
    of_logits = trial.task.name in ("language", "seq2seq") and trial.task.loss_chunks == 1
    return trial.compile and trial.compile_loss and of_logits


def _effective(trial: TrialConfig, ranks: Ranks) -> dict[str, Any]:
    return {"compile_loss": compiles_loss(trial)}


def _notes(trial: TrialConfig, where: Where) -> Iterator[str]:
    if trial.compile and where.trains and trial.memory_profile.name != "off":
        yield (
            "compile=true: the memory profile has what the allocators report. What the step allocates counts as "
            "`other`, since they do not report what it is for."
        )


AXIS = Axis(("compile", "compile_loss"), changes_losses=True, effective=_effective, notes=_notes)
