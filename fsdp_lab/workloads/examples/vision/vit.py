"""torchvision's Vision Transformer, which names its blocks."""

from __future__ import annotations

from typing import ClassVar

import torchvision

from fsdp_lab.workloads.examples.vision import VIT_TP_PLAN


class VisionTransformer(torchvision.models.VisionTransformer):
    """The same, with blocks that are found even if it has only one."""

    _no_split_modules = ("EncoderBlock",)
    _tp_plan: ClassVar[dict[str, str]] = VIT_TP_PLAN
