"""The task: tell the class of an image."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_lab.config.workload import ModelConfig
from fsdp_lab.workloads.vision.images import ImageBatch, expand_channels


class Classification:
    """Cross entropy and accuracy of `(images, labels)`; a label of -1 is padding."""

    unit = "samples"

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    def forward(self, model: nn.Module, batch: ImageBatch) -> Tensor:
        images, _ = batch
        return model(expand_channels(images, self.config))

    def loss(self, outputs: Tensor, batch: ImageBatch) -> Tensor:
        _, labels = batch
        return F.cross_entropy(outputs.float(), labels)

    def metrics(self, outputs: Tensor, batch: ImageBatch) -> dict[str, tuple[Tensor, Tensor]]:
        _, labels = batch
        logits = outputs.float()
        count = (labels >= 0).sum()
        return {
            "loss": (F.cross_entropy(logits, labels, ignore_index=-1, reduction="sum"), count),
            "accuracy": ((logits.argmax(1) == labels).sum(), count),
        }
