"""The models, each named together with its block class and the distribution of its weights.

Nothing here knows of sharding: `parallelize.py` applies that from outside.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fsdp_lab.config.schema import Family, ModelConfig

DrawParameter = Callable[[nn.Module, str, Tensor, torch.Generator], None]


@dataclass(frozen=True)
class ModelSpec:
    """How to build a model, the class of its repeating block, and how to draw one of its parameters."""

    build: Callable[[], nn.Module]
    block_class: type[nn.Module]
    draw_parameter: DrawParameter


def model_spec(config: ModelConfig) -> ModelSpec:
    """The spec of the configured model. Torchvision is imported only for the family that needs it."""
    if config.family is Family.mlp:
        return ModelSpec(lambda: Mlp(config), MlpBlock, draw_linear)
    from torchvision.models.vision_transformer import EncoderBlock

    return ModelSpec(lambda: build_vit(config), EncoderBlock, draw_vit_parameter)


def build_vit(config: ModelConfig) -> nn.Module:
    """Torchvision's Vision Transformer, its first convolution replaced where images are not RGB."""
    from torchvision.models import VisionTransformer

    assert config.patch_size and config.num_heads and config.mlp_dim
    model = VisionTransformer(
        image_size=config.image_size,
        patch_size=config.patch_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        hidden_dim=config.hidden_dim,
        mlp_dim=config.mlp_dim,
        num_classes=config.num_classes,
    )
    if config.num_channels != 3:
        model.conv_proj = nn.Conv2d(
            config.num_channels, config.hidden_dim, kernel_size=config.patch_size, stride=config.patch_size
        )
    return model


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
        return self.head(self.blocks(images.flatten(1)))


@torch.no_grad()
def draw_linear(owner: nn.Module, name: str, out: Tensor, generator: torch.Generator) -> None:
    """PyTorch's own default for a linear layer: uniform within 1/sqrt(fan_in)."""
    assert isinstance(owner, nn.Linear)
    bound = 1 / math.sqrt(owner.in_features)
    out.uniform_(-bound, bound, generator=generator)


@torch.no_grad()
def draw_vit_parameter(owner: nn.Module, name: str, out: Tensor, generator: torch.Generator) -> None:
    """The distributions that torchvision's VisionTransformer draws from, one parameter at a time.

    `name` is the parameter's full name: torchvision treats equal layers in different places differently.
    """
    leaf = name.rsplit(".", 1)[-1]
    if isinstance(owner, nn.LayerNorm):
        out.fill_(1.0 if leaf == "weight" else 0.0)
    elif leaf == "pos_embedding":
        out.normal_(std=0.02, generator=generator)
    elif isinstance(owner, nn.Conv2d) and leaf == "weight":
        fan_in = owner.in_channels * owner.kernel_size[0] * owner.kernel_size[1]
        nn.init.trunc_normal_(out, std=math.sqrt(1 / fan_in), generator=generator)
    elif leaf == "in_proj_weight" or (".mlp." in name and leaf == "weight"):
        nn.init.xavier_uniform_(out, generator=generator)
    elif ".mlp." in name:
        out.normal_(std=1e-6, generator=generator)
    elif ".out_proj." in name and leaf == "weight":
        draw_linear(owner, name, out, generator)
    else:  # the class token, the classification head, and every other bias
        out.zero_()
