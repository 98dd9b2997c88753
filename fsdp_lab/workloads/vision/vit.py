"""torchvision's Vision Transformer, which names its blocks."""

from __future__ import annotations

import torchvision


class VisionTransformer(torchvision.models.VisionTransformer):
    """The same, with blocks that are found even if there is one."""

    _no_split_modules = ("EncoderBlock",)
