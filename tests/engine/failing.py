"""A model that fails on one rank."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn


class FailsOnRank0(nn.Module):
    """A linear layer over 64 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Rank 1 waits for rank 0 in the collective that comes next."""
        if dist.get_rank() == 0:
            raise RuntimeError("the first step fails")
        return self.head(images.flatten(1))
