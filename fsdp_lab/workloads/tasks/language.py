"""The task `language`: predict each next token."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fsdp_lab.config.errors import UserError
from fsdp_lab.config.workload import ModelConfig, TaskConfig
from fsdp_lab.workloads.base import part_of
from fsdp_lab.workloads.tasks.tokens import TokenLoss


def build_task(config: TaskConfig, model: ModelConfig) -> Language:
    return Language(config.loss_chunks)


class Language(TokenLoss):
    """Cross entropy of tokens `(batch, seq + 1)`: all but the last are inputs, all but the first labels; -1 is padding.

    The model returns logits `(batch, seq, vocabulary)`, or an object with these as its `logits`.

    Args:
        loss_chunks: the number of parts of the sequence in which the model itself computes the loss, so that it never
            holds the logits of all tokens. From 2 on it is called as `model(tokens, labels=..., loss_chunks=...)` and
            returns the sum of the losses and the number of labels that are not -1.
    """

    ignored = -1

    def __init__(self, loss_chunks: int = 1) -> None:
        self.loss_chunks = loss_chunks

    def forward(self, model: nn.Module, batch: Tensor) -> Any:
        """Return the logits; with chunks, the sum of the losses and the number of labels that count."""
        tokens = batch[:, :-1].clamp(min=0)  # an embedding has no row for padding
        if self.loss_chunks == 1:
            outputs = model(tokens)
            logits = outputs if isinstance(outputs, Tensor) else part_of(outputs, "logits")
            if not isinstance(logits, Tensor):
                raise UserError(
                    f"task=language: the model returns a {type(outputs).__name__} without logits; return these, or an "
                    "object or a dictionary that has them as logits. Or leave out task=language, and name a loss "
                    "of your own by task.loss=<package.function>."
                )
            return logits
        return model(tokens, labels=batch[:, 1:], loss_chunks=self.loss_chunks)

    def labels(self, batch: Tensor) -> Tensor:
        return batch[:, 1:]

    def sum_and_count(self, outputs: Any, batch: Tensor) -> tuple[Tensor, Tensor]:
        if self.loss_chunks == 1:
            return super().sum_and_count(outputs, batch)
        total, count = outputs
        return total, count
