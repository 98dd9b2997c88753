"""The task `classification`: predict the class of an item, usually an image."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_lab.config.errors import UserError
from fsdp_lab.config.workload import ModelConfig, TaskConfig
from fsdp_lab.workloads.base import Batch, describe, part_of


def build_task(config: TaskConfig, model: ModelConfig) -> Classification:
    """Return the task. If the model's images are known, it decides their channels."""
    return Classification(model.sizes().get("num_channels"))


class Classification:
    """Cross entropy and accuracy of `(inputs, labels)`; a label below 0, such as padding, does not count.

    Args:
        num_channels: of the model's images; None: inputs stay as they are.
    """

    unit = "samples"

    def __init__(self, num_channels: int | None = None) -> None:
        self.num_channels = num_channels

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the logits `(batch, classes)`.

        Raises:
            UserError: the batch is no such pair, or the model returns no logits.
        """
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise UserError(
                f"task=classification takes (inputs, labels), but this data set returns {describe(batch)}; use "
                "task.loss=<package.function>."
            )
        inputs, _ = batch
        return logits_of(model(inputs if self.num_channels is None else expand_channels(inputs, self.num_channels)))

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the mean cross entropy of the labels that count; 0 without any."""
        total, count = self._sum_and_count(outputs, batch)
        return total / count.clamp(min=1)

    def num_labels(self, batch: Batch) -> Tensor:
        return (batch[1] >= 0).sum()

    def units(self, batch: Batch) -> int:
        return len(batch[1])

    def metrics(self, outputs: Tensor, batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
        _, labels = batch
        total, count = self._sum_and_count(outputs, batch)
        return {"loss": (total, count), "accuracy": ((outputs.float().argmax(1) == labels).sum(), count)}

    def _sum_and_count(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        labels = batch[1].clamp(min=-1)
        return F.cross_entropy(outputs.float(), labels, ignore_index=-1, reduction="sum"), self.num_labels(batch)


def logits_of(outputs: Any) -> Tensor:
    """Return the logits of a model's outputs: a tensor, the first of a tuple or list, or `logits`.

    Raises:
        UserError: the outputs have no logits of two dimensions.
    """
    logits = part_of(outputs, "logits")
    if logits is None:
        logits = outputs[0] if isinstance(outputs, tuple | list) and outputs else outputs
    if isinstance(logits, Tensor) and logits.ndim == 2:
        return logits
    raise UserError(
        f"task=classification: the model returns {describe(outputs)}; it must return logits of shape (batch, classes), "
        "alone, first in a tuple, or named logits; for another task use task.loss=<package.function>."
    )


def expand_channels(images: Tensor, num_channels: int) -> Tensor:
    """Return images `(B, 1 or C, S, S)` as `(B, C, S, S)` with C = `num_channels`; a grey one becomes a view.

    Called after the copy to the device: a view with a stride of 0 cannot be pinned, and would be copied channel by
    channel.
    """
    return images.expand(-1, num_channels, -1, -1)
