"""Torchvision's Vision Transformer."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fsdp_lab.config.workload import ModelConfig
from fsdp_lab.workloads.base import ModelSpec
from fsdp_lab.workloads.vision.mlp import draw_linear


def build_model(config: ModelConfig) -> ModelSpec:
    from torchvision.models.vision_transformer import EncoderBlock

    description = f"{config.family}, {config.num_layers} layers of {config.hidden_dim}"
    return ModelSpec(lambda: build_vit(config), (EncoderBlock,), draw_vit_parameter, description)


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
