"""The cross entropy of tokens, which the tasks `language` and `seq2seq` share."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_lab.workloads.base import Batch


def summed_cross_entropy(logits: Tensor, labels: Tensor, ignored: int) -> Tensor:
    """Return the cross entropy, computed in float32 and summed over the labels that count.

    Args:
        logits: `(batch, length, vocabulary)`.
        labels: int64 `(batch, length)`.
        ignored: the label that does not count.
    """
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=ignored, reduction="sum")


class TokenLoss:
    """The mean cross entropy of the labels of a batch that are not `ignored`."""

    unit = "tokens"
    ignored: int
    _cross_entropy = staticmethod(summed_cross_entropy)

    def compile_loss(self) -> None:
        """Compile the cross entropy. It then keeps the logits in their own type, and nothing else of their size."""
        self._cross_entropy = torch.compile(summed_cross_entropy)  # type: ignore[assignment]

    def labels(self, batch: Batch) -> Tensor:
        """Return the labels `(batch, length)`."""
        raise NotImplementedError

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the mean loss of the labels that count; 0 without any."""
        total, count = self.sum_and_count(outputs, batch)
        return total / count.clamp(min=1)

    def metrics(self, outputs: Any, batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
        return {"loss": self.sum_and_count(outputs, batch)}

    def sum_and_count(self, outputs: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        return self._cross_entropy(outputs, self.labels(batch), self.ignored), self.num_labels(batch)

    def num_labels(self, batch: Batch) -> Tensor:
        return (self.labels(batch) != self.ignored).sum()

    def units(self, batch: Batch) -> int:
        """Return the number of labels that count; for a batch on `meta`, of all labels."""
        labels = self.labels(batch)
        return labels.numel() if labels.is_meta else int(self.num_labels(batch))
