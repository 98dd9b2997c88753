"""`sharding.forward_prefetch`, `backward_prefetch`, `separate_reduce_scatter_group`: what overlaps with computation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Optional  # OmegaConf reads this on every Python that this project supports

from fsdp_lab.config.axes.base import Axis
from fsdp_lab.config.key import key, not_negative

if TYPE_CHECKING:
    from fsdp_lab.config.ranks import Ranks
    from fsdp_lab.config.trial import TrialConfig


@dataclass
class PrefetchKeys:
    separate_reduce_scatter_group: bool = key(False)
    """Reduce gradients on a separate communicator, in parallel with the all-gathers."""
    forward_prefetch: Optional[int] = key(None, not_negative)
    """Units to gather ahead in the forward pass; null: PyTorch's default."""
    backward_prefetch: Optional[int] = key(None, not_negative)
    """Units to gather ahead in the backward pass; null: PyTorch's default."""


def _effective(trial: TrialConfig, ranks: Ranks) -> dict[str, Any]:
    """Return the units that are gathered ahead.

    FSDP1's default is one in the backward pass; FSDP2's null differs from any number.
    """
    sharding = trial.sharding
    if sharding.api.name == "fsdp2":
        return {}
    back = 1 if sharding.backward_prefetch is None else sharding.backward_prefetch
    return {"sharding.forward_prefetch": sharding.forward_prefetch or 0, "sharding.backward_prefetch": back}


AXIS = Axis(
    ("sharding.forward_prefetch", "sharding.backward_prefetch", "sharding.separate_reduce_scatter_group"),
    # not in 2.11, in 2.13
    since={"sharding.separate_reduce_scatter_group": ("set_separate_reduce_scatter_group", (2, 12))},
    divides=True,
    effective=_effective,
)
