"""A model and a data set that the package does not know, as a user would write them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fsdp_lab.config.workload import DataConfig, ModelConfig
from fsdp_lab.workloads import ModelSpec
from fsdp_lab.workloads.vision.images import ImageSource, Split


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x).tanh()


class Tiny(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.num_channels * config.image_size**2
        self.blocks = nn.ModuleList(Block(width) for _ in range(config.num_layers))
        self.head = nn.Linear(width, config.num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = images.flatten(1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build_model(config: ModelConfig) -> ModelSpec:
    return ModelSpec(lambda: Tiny(config), (Block,), "tiny")


def build_source(data: DataConfig, model: ModelConfig) -> ImageSource:
    """Two classes: dark images and bright ones."""

    def split(count: int) -> Split:
        labels = torch.arange(count) % 2
        return Split((labels * 200 + 20).to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 4, 4), labels)

    return ImageSource((1, 4, 4), num_classes=2, read=lambda: (split(64), split(10)))
