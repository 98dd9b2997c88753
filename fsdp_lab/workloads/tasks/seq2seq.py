"""The task `seq2seq`: write the target of each source."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from fsdp_lab.config.errors import UserError
from fsdp_lab.config.workload import ModelConfig, TaskConfig
from fsdp_lab.workloads.base import Batch, describe, part_of
from fsdp_lab.workloads.tasks.tokens import TokenLoss

IGNORED = -100  # the label of padding
INPUTS = ("input_ids", "attention_mask", "labels")


def build_task(config: TaskConfig, model: ModelConfig) -> Seq2Seq:
    """Return the task. The arguments do not change it."""
    return Seq2Seq()


class Seq2Seq(TokenLoss):
    """Cross entropy of the labels of a batch `{input_ids, attention_mask, labels}`, all int64 `(batch, length)`.

    A label of -100 does not count. The model is called with these three by name and feeds its decoder with the labels
    shifted right by one. It returns an object or a dictionary with `logits` `(batch, target length, vocabulary)`.
    """

    ignored = IGNORED
    name = "task=seq2seq"

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the logits. A loss that the model computed itself is dropped with its graph.

        Raises:
            UserError: the batch lacks one of the three, or the output has no logits.
        """
        if not isinstance(batch, Mapping) or any(name not in batch for name in INPUTS):
            raise UserError(
                f"task=seq2seq needs a batch with {', '.join(INPUTS)}, but got {describe(batch)}; let data.collate_fn "
                "return such a dictionary, or use data=pydoc_summaries or data=wikihow."
            )
        outputs = model(**{name: batch[name] for name in INPUTS})
        logits = part_of(outputs, "logits")
        if not isinstance(logits, Tensor):
            raise UserError(
                f"task=seq2seq: the model returns a {type(outputs).__name__} without logits; return an object with "
                "that attribute, or a dictionary with that key."
            )
        return logits

    def labels(self, batch: Batch) -> Tensor:
        labels: Tensor = batch["labels"]
        return labels
