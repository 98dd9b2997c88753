"""A model that fails in its first step, on one rank alone."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn


class FailsOnRank0(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Rank 1 waits for rank 0 in the collective that comes next."""
        x = images.flatten(1)
        if dist.get_rank() == 0:
            raise RuntimeError("the first step fails")
        for block in self.blocks:
            x = block(x)
        return self.head(x)
