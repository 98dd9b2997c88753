"""Torchvision's Vision Transformer."""

from __future__ import annotations

from torch import nn

from fsdp_lab.config.workload import ModelConfig
from fsdp_lab.workloads.base import ModelSpec


def build_model(config: ModelConfig) -> ModelSpec:
    """Return the spec of the Vision Transformer; its blocks are torchvision's `EncoderBlock`."""
    from torchvision.models.vision_transformer import EncoderBlock

    description = f"{config.family}, {config.num_layers} layers of {config.hidden_dim}"
    return ModelSpec(lambda: build_vit(config), (EncoderBlock,), description)


def build_vit(config: ModelConfig) -> nn.Module:
    """Return torchvision's Vision Transformer; its first convolution is replaced if images are not RGB."""
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
