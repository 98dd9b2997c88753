"""A cross entropy that never holds all logits at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

IGNORED = -1  # the label of tokens that do not count


def loss_in_chunks(head: nn.Module, x: Tensor, labels: Tensor, chunks: int) -> tuple[Tensor, Tensor]:
    """Return the sum of the cross entropy, and the number of labels that count: those that are not -1.

    Args:
        head: makes the logits of `x`.
        x: the last hidden states, `(batch, seq, dim)`.
        labels: int64 `(batch, seq)`.
        chunks: the number of parts of the sequence. Only one part has logits at a time; the backward pass computes
            them again.
    """

    def loss_sum(x: Tensor, labels: Tensor) -> Tensor:
        logits = head(x.flatten(0, 1)).float()
        return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum")

    parts = zip(x.tensor_split(chunks, dim=1), labels.tensor_split(chunks, dim=1), strict=True)
    losses = [checkpoint(loss_sum, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
    return torch.stack(losses).sum(), (labels != IGNORED).sum()
