"""A multilayer perceptron."""

from __future__ import annotations

import itertools

from torch import Tensor, nn


class MlpBlock(nn.Sequential):
    """Linear and ReLU."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__(nn.Linear(num_in, num_out), nn.ReLU())


class Mlp(nn.Module):
    """Hidden blocks of the given widths over the flattened image, then a linear head: 1024-1024-10 by default."""

    _no_split_modules = ("MlpBlock",)

    def __init__(self, num_inputs: int, widths: list[int], num_classes: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(MlpBlock(a, b) for a, b in itertools.pairwise([num_inputs, *widths])))
        self.head = nn.Linear(widths[-1], num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits `(batch, classes)` of images `(batch, channels, height, width)`."""
        return self.head(self.blocks(images.flatten(1)))
