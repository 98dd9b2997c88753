"""A multilayer perceptron."""

from __future__ import annotations

import itertools

from torch import Tensor, nn

from fsdp_lab.config.workload import ModelConfig
from fsdp_lab.workloads.base import ModelSpec


def build_model(config: ModelConfig) -> ModelSpec:
    """Return the spec of the perceptron; its blocks are `MlpBlock`."""
    description = f"{config.family}, {config.num_layers} layers of {config.hidden_dim}"
    return ModelSpec(lambda: Mlp(config), (MlpBlock,), description)


class MlpBlock(nn.Sequential):
    """Linear and ReLU."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__(nn.Linear(num_in, num_out), nn.ReLU())


class Mlp(nn.Module):
    """`num_layers` hidden blocks over the flattened image, then a linear head: 1024-1024-10 by default."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        num_inputs = config.num_channels * config.image_size**2
        widths = [num_inputs] + [config.hidden_dim] * config.num_layers
        self.blocks = nn.Sequential(*(MlpBlock(a, b) for a, b in itertools.pairwise(widths)))
        self.head = nn.Linear(config.hidden_dim, config.num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits `(batch, classes)` of images `(batch, channels, height, width)`."""
        return self.head(self.blocks(images.flatten(1)))
