"""`sharding.embeddings`: where `per_block` puts what is outside of the blocks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from fsdp_lab.config.axes.base import Axis
from fsdp_lab.config.errors import CombinationError
from fsdp_lab.config.key import key

if TYPE_CHECKING:
    from fsdp_lab.config.ranks import Ranks
    from fsdp_lab.config.trial import TrialConfig


class Embeddings(Enum):
    """Where `per_block` puts what is outside of the blocks; see `EmbeddingsKeys.embeddings`."""

    root = "root"
    own = "own"


@dataclass
class EmbeddingsKeys:
    embeddings: Embeddings = key(Embeddings.root)
    """Embeddings, last norm and head are part of the root's unit (`root`), or units of their own (`own`)."""


def _check(trial: TrialConfig, ranks: Ranks) -> None:
    granularity, chunks = trial.sharding.granularity.name, trial.task.loss_chunks
    if trial.sharding.embeddings is Embeddings.root:
        return
    if granularity != "per_block":
        raise CombinationError(
            f"sharding.embeddings=own with sharding={granularity}: only sharding=per_block puts what is "
            "outside of the blocks into the root's unit; use sharding.embeddings=root or sharding=per_block.",
        )
    if chunks > 1:
        raise CombinationError(
            f"sharding.embeddings=own with task.loss_chunks={chunks}: the head's unit would reduce its "
            "gradients once a chunk; use sharding.embeddings=root or task.loss_chunks=1.",
        )


AXIS = Axis(("sharding.embeddings",), divides=True, check=_check)
