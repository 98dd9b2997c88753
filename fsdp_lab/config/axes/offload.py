"""`offload`: where sharded parameters, gradients and optimizer state are kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from fsdp_lab.config.axes.base import Axis, Where
from fsdp_lab.config.key import key

if TYPE_CHECKING:
    from fsdp_lab.config.trial import TrialConfig


class OffloadTarget(Enum):
    """Where sharded parameters are kept: on the device, or in pinned or pageable host memory."""

    none = "none"
    cpu = "cpu"
    cpu_unpinned = "cpu_unpinned"


@dataclass
class OffloadConfig:
    """Where sharded parameters, gradients and optimizer state are kept."""

    target: OffloadTarget = key(OffloadTarget.none, named_by_option=True)
    """Keep sharded parameters on the device, in pinned host memory (`cpu`), or in pageable host memory."""

    def backend(self, cuda: bool) -> str:
        """Return the backend of a trial's process group.

        On GPUs gloo joins NCCL only for offloaded gradients, whose norm is reduced on the host: gloo connects each rank
        with every other. An asynchronous checkpoint has a group of its own.
        """
        if not cuda:
            return "gloo"
        return "nccl" if self.target is OffloadTarget.none else "cpu:gloo,cuda:nccl"


def _notes(trial: TrialConfig, where: Where) -> Iterator[str]:
    if trial.offload.target is not OffloadTarget.none and not where.cuda:
        yield (
            f"offload={trial.offload.target.name} has no effect on a CPU: parameters are in host memory "
            "already, and nothing is pinned."
        )


AXIS = Axis(("offload",), plain="none", notes=_notes)
