"""torchvision's Vision Transformer, which names its blocks."""

from __future__ import annotations

from typing import ClassVar

import torchvision

TP_PLAN = {"encoder.layers.encoder_layer_*.mlp.0": "colwise", "encoder.layers.encoder_layer_*.mlp.3": "rowwise"}


class VisionTransformer(torchvision.models.VisionTransformer):
    """The same, with blocks that are found even if there is one.

    Tensor parallelism divides the MLPs. Attention stays whole on each rank: torchvision packs queries, keys and values
    into one parameter.
    """

    _no_split_modules = ("EncoderBlock",)
    _tp_plan: ClassVar[dict[str, str]] = TP_PLAN
