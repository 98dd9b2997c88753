"""A model and a data set that the package does not know, as a user would write them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fsdp_lab.workloads.vision.images import Images


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x).tanh()


class Tiny(nn.Module):
    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_layers))
        self.head = nn.Linear(width, 2)

    def forward(self, images: Tensor) -> Tensor:
        x = images.flatten(1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class DarkOrBright(Images):
    """Two classes: dark images and bright ones."""

    shape, num_classes = (1, 4), 2

    def __init__(self, split: str) -> None:
        labels = torch.arange(64 if split == "train" else 10) % 2
        super().__init__((labels * 200 + 20).to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 4, 4), labels)
