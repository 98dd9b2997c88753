"""Pairs of texts of different lengths, as a sequence-to-sequence model takes them, and a loss of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, LONGEST, TARGET, TOLD = 64, 12, 6, 4


class Pairs:
    """The first tokens of a row of random ones are to be told. Rows have different lengths, what is to be told has one:
    a mean over the labels of a rank is then one over all."""

    def __init__(self, split: str, least: int = TARGET) -> None:
        generator = torch.Generator().manual_seed(0 if split == "train" else 1)
        count = 128 if split == "train" else 30
        self.tokens = torch.randint(2, VOCABULARY, (count, LONGEST), generator=generator)
        self.lengths = torch.randint(least, LONGEST + 1, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        length = int(self.lengths[index])
        mask = (torch.arange(LONGEST) < length).long()
        labels = torch.full((TARGET,), -100)
        labels[:TOLD] = self.tokens[index, :TOLD]
        return {"input_ids": self.tokens[index] * mask, "attention_mask": mask, "labels": labels}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(**batch).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten(), ignore_index=-100)
