"""A user's model whose labels do not all count, and losses that return their sum and their number: plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 8


class Told(nn.Module):
    """Tells each token from the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


def _of_each_label(model: Any, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of each label, 0 of those that do not count, and which count; -1 does not."""
    labels = rows[:, 1:]
    logits = model(rows[:, :-1].clamp(min=0)).float().transpose(1, 2)
    return F.cross_entropy(logits, labels, ignore_index=-1, reduction="none"), labels >= 0


def loss(model: Any, rows: Tensor) -> tuple[Tensor, Tensor]:
    losses, counts = _of_each_label(model, rows)
    return losses.sum(), counts.sum()


def mean(model: Any, rows: Tensor) -> Tensor:
    """Over the labels of a whole batch; 0 without any."""
    total, count = loss(model, rows)
    return total / max(int(count), 1)


def weighted(model: Any, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Later tokens weigh more, and the count is the sum of the weights."""
    losses, counts = _of_each_label(model, rows)
    weights = counts * (1 + torch.arange(counts.shape[1], device=rows.device) / 4)
    return (losses * weights).sum(), weights.sum()


def weighted_mean(model: Any, rows: Tensor) -> Tensor:
    total, weight = weighted(model, rows)
    return total / weight if weight > 0 else total


# What is no pair of a sum and a count, or not always.


def with_accuracy(model: Any, rows: Tensor) -> tuple[Tensor, Tensor]:
    losses, _ = _of_each_label(model, rows)
    return losses.sum() / 9, torch.tensor(0.25)


def with_logits(model: Any, rows: Tensor) -> tuple[Tensor, Tensor]:
    return loss(model, rows)[0], model(rows[:, :-1].clamp(min=0))


def number_as_count(model: Any, rows: Tensor) -> tuple[Tensor, int]:
    total, count = loss(model, rows)
    return total, len(rows) if count.is_meta else int(count)


def of_each_row(model: Any, rows: Tensor) -> tuple[Tensor, Tensor]:
    total, count = loss(model, rows)
    return total.expand(len(rows)), count


def without_gradient(model: Any, rows: Tensor) -> tuple[Tensor, Tensor]:
    total, count = loss(model, rows)
    return total.detach(), count


def learned_count(model: Any, rows: Tensor) -> tuple[Tensor, Tensor]:
    total, count = loss(model, rows)
    return total, count * model(rows[:, :-1].clamp(min=0)).sigmoid().mean()


def swapped(model: Any, rows: Tensor) -> tuple[Tensor, Tensor]:
    total, count = loss(model, rows)
    return count, total


def three(model: Any, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return *loss(model, rows), torch.ones(())


def mean_on_the_second(model: Any, rows: Tensor) -> Any:
    total, count = loss(model, rows)
    return total / 9 if dist.get_rank() == 1 else (total, count)
