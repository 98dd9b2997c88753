"""What a language model is told about each token, against sums over tokens written down one by one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fsdp_lab.workloads.language.task import Language
from tests.workloads.language.test_llama import small

BATCH = torch.randint(50, (4, 9), generator=torch.Generator().manual_seed(3))


def by_hand(batch: Tensor) -> list[float]:
    """The loss of each token that counts: minus the logarithm of what the model gave it."""
    losses = []
    for row in batch:
        if row[0] < 0:
            continue
        shares = small()(row[None, :-1])[0].detach().double().softmax(-1)
        losses += [-math.log(shares[i, token]) for i, token in enumerate(row[1:])]
    return losses


@pytest.mark.parametrize("chunks", [1, 3])
def test_each_token_is_distinguished_from_those_before_it(chunks: int):
    task = Language(loss_chunks=chunks)
    outputs = task.forward(small(), BATCH)
    losses = by_hand(BATCH)
    assert len(losses) == 4 * 8 == task.units(BATCH)
    assert task.loss(outputs, BATCH).item() == pytest.approx(sum(losses) / len(losses), rel=1e-6)
    total, count = task.metrics(outputs, BATCH)["loss"]
    assert total.item() == pytest.approx(sum(losses), rel=1e-6) and count == len(losses)


@pytest.mark.parametrize("chunks", [1, 3])
def test_rows_of_padding_do_not_count(chunks: int):
    """Nor do they change what is said of the others: -1 is not a row of the embedding."""
    padded = BATCH.clone()
    padded[1:3] = -1
    task, losses = Language(loss_chunks=chunks), by_hand(padded)
    total, count = task.metrics(task.forward(small(), padded), padded)["loss"]
    assert total.item() == pytest.approx(sum(losses), rel=1e-6) and count == len(losses) == task.units(padded) == 16
    assert task.units(padded.to("meta")) == 32, "by its shape"
    nothing = torch.full_like(BATCH, -1)
    assert [x.item() for x in task.metrics(task.forward(small(), nothing), nothing)["loss"]] == [0, 0]


def test_logits_count_in_float32():
    """A sum in bfloat16 would end at the first few tokens."""
    logits = torch.zeros(8, 512, 50, dtype=torch.bfloat16)
    total, count = Language().metrics(logits, torch.zeros(8, 513, dtype=torch.int64))["loss"]
    assert total.item() == pytest.approx(8 * 512 * math.log(50), rel=1e-5) and count == 8 * 512
