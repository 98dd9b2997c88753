"""What one optimizer step holds at its peak.

On CUDA the allocator knows. On a CPU there is no allocator to ask, so PyTorch's tracker follows every
tensor through one step, which is kept out of the timed ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.fsdp import FSDPModule

from fsdp_lab.training.distributed import Ranks

TRACKED_STEP = 2  # of this process: the optimizer's state is there from the first on

# The tracker's names -> the project's metric keys. Of the two spellings, one is FSDP's and one is DDP's.
CATEGORIES = {
    "Sharded Param": "param_bytes",
    "Parameter": "param_bytes",
    "Unsharded Param": "unsharded_param_bytes",
    "Sharded Grad": "grad_bytes",
    "Unsharded Grad": "unsharded_grad_bytes",
    "Gradient": "grad_bytes",
    "OptState": "optimizer_bytes",
    "Optstate": "optimizer_bytes",
    "Activation": "activation_bytes",
    "All Gather": "all_gather_bytes",
    "Reduce Scatter": "reduce_scatter_bytes",
    "Temp": "temp_bytes",
    "Buffer": "buffer_bytes",
    "Inputs": "input_bytes",
}


class MemoryProfile:
    """Follows the peak of a run; `figures` has it in bytes, per rank and in the maximum over ranks."""

    def __init__(self, enabled: bool, ranks: Ranks) -> None:
        self.enabled, self.ranks = enabled, ranks
        self._asked = 0
        self._mine: dict[str, float] = {}
        self._figures: dict[str, float] | None = None
        if enabled and ranks.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(ranks.device)

    def tracks(self) -> bool:
        """Whether the next step is the one to follow tensor by tensor. Asked once before each step."""
        self._asked += 1
        return self.enabled and self.ranks.device.type == "cpu" and self._asked == TRACKED_STEP

    @contextmanager
    def track(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Follow every tensor of one step on this rank."""
        tracker: MemTracker
        if isinstance(model, FSDPModule):
            tracker = FSDPMemTracker(model, optimizer)
        else:
            tracker = MemTracker()
            tracker.track_external(model, optimizer)
        with tracker:
            yield
        self._mine = breakdown(tracker.get_tracker_snapshot("peak"))

    def figures(self) -> dict[str, float]:
        """The keys `memory/*`. Every rank calls it; the peaks are all-gathered."""
        if not self.enabled:
            return {}
        if self.ranks.device.type == "cuda":
            device = self.ranks.device
            mine = {
                "peak_bytes": float(torch.cuda.max_memory_allocated(device)),
                "reserved_bytes": float(torch.cuda.max_memory_reserved(device)),
            }
            return over_ranks(mine)
        if self._figures is None and self._mine:
            self._figures = over_ranks(self._mine)
        return self._figures or {}


def breakdown(snapshot: dict[torch.device, dict[Any, int]]) -> dict[str, float]:
    """The tracker's peak snapshot under the project's names; all devices of this rank together."""
    out: dict[str, float] = {}
    for by_kind in snapshot.values():
        for kind, num_bytes in by_kind.items():
            name = str(getattr(kind, "value", kind))
            key = "peak_bytes" if name == "Total" else CATEGORIES.get(name, "other_bytes")
            out[key] = out.get(key, 0.0) + float(num_bytes)
    return out


def over_ranks(mine: dict[str, float]) -> dict[str, float]:
    """`memory/rank<r>/<key>` for the totals of every rank, and `memory/<key>` of the rank with the highest peak."""
    everyone: list[dict[str, float]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    highest = max(everyone, key=lambda figures: figures["peak_bytes"])
    out = {f"memory/{key}": value for key, value in highest.items()}
    for rank, figures in enumerate(everyone):
        for key in ("peak_bytes", "reserved_bytes"):
            if key in figures:
                out[f"memory/rank{rank}/{key}"] = figures[key]
    return out
