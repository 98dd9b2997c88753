"""The axes of a sweep, one file per axis.

To add one, write its file, list it here, and make the dataclass of its keys a base class
of its group in `trial.py` or `training.py`. The training code is in `fsdp_lab/training`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fsdp_lab.config.axes import (
    activation_offload,
    api,
    checkpointing,
    compile,
    embeddings,
    offload,
    precision,
    prefetch,
    reshard,
    sharding,
    tensor_parallel,
)
from fsdp_lab.config.axes.base import Axis, Where

if TYPE_CHECKING:
    from fsdp_lab.config.ranks import Ranks
    from fsdp_lab.config.trial import TrialConfig

# In the order in which rules apply; an earlier axis weighs more when settings tie.
AXES: tuple[Axis, ...] = (
    sharding.AXIS, api.AXIS, embeddings.AXIS, tensor_parallel.AXIS, prefetch.AXIS, precision.AXIS, offload.AXIS,
    reshard.AXIS, checkpointing.AXIS, activation_offload.AXIS, compile.AXIS,
)  # fmt: skip


def effective(trial: TrialConfig, ranks: Ranks) -> dict[str, Any]:
    """Return the values of the keys that other keys and the ranks decide."""
    return {name: value for axis in AXES for name, value in axis.effective(trial, ranks).items()}


def notes(trial: TrialConfig, where: Where) -> Iterator[str]:
    """Yield a sentence for each setting with an unexpected effect."""
    for axis in AXES:
        yield from axis.notes(trial, where)
