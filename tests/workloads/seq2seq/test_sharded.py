"""Sharded, a model that writes one text after reading another learns what one process learns, however many labels a
rank's part of a batch has; and a step holds what was forecast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import default_collate

from tests.forecast.test_equality import differences
from tests.ranks import config, run_ranks, train_all
from tests.takehome.scripts import train_and_run
from tests.training.reference import apart
from tests.workloads.seq2seq.net import Ragged, Summariser

HERE = "tests.workloads.seq2seq.net"
WORDS = [
    f"model._target_={HERE}.Summariser", "model.vocab_size=20", f"data._target_={HERE}.Ragged", "task=seq2seq",
    "data.num_train=48", "training.global_batch_size=8", "optimizer.lr=0.01", "optimizer.weight_decay=0.1",
]  # fmt: skip
CELLS = [
    "sharding=ddp",
    "sharding=root reshard_after_forward=always",
    "sharding=per_block reshard_after_forward=always",
    "sharding=per_block reshard_after_forward=never training.grad_accum_steps=4",
    "sharding=ddp training.grad_accum_steps=2",
    "sharding=per_block activation_checkpointing=full model.as_dict=true",
]


def sum_and_count(model: Summariser, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    logits, labels = model(**batch).logits, batch["labels"]  # type: ignore[union-attr]
    each = F.cross_entropy(logits.transpose(1, 2), labels.clamp(min=0), reduction="none")
    return each[labels >= 0].sum(), int((labels >= 0).sum())


def unsharded(seed: int = 0) -> tuple[list[float], float]:
    """The loss of every step and of the validation split, by one process in one loop."""
    torch.manual_seed(seed)
    model, losses, train, val = Summariser(20), [], Ragged("train"), Ragged("val")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.1)
    order = torch.randperm(48, generator=torch.Generator().manual_seed(seed * 1_000_003))
    for indices in order.split(8):
        optimizer.zero_grad()
        total, count = sum_and_count(model, default_collate([train[i] for i in indices.tolist()]))
        (total / count).backward()
        optimizer.step()
        losses.append(total.item() / count)
    with torch.no_grad():
        total, count = sum_and_count(model.eval(), default_collate([val[i] for i in range(len(val))]))
    return losses, total.item() / count


@pytest.fixture(scope="module")
def sharded() -> list[Any]:
    first, second = run_ranks(2, train_all, [[*WORDS, *cell.split()] for cell in CELLS])
    assert [losses for losses, _ in first] == [losses for losses, _ in second]
    return first


def test_a_rank_with_fewer_labels_weighs_less(sharded: list[Any]) -> None:
    torch.set_num_threads(1)
    expected, val_loss = unsharded()
    for cell, (losses, reported) in zip(CELLS, sharded, strict=True):
        assert apart(losses, expected) <= 1e-5, cell
        assert abs(reported[-1]["val/loss"] - val_loss) <= 1e-5, cell
        assert reported[-1]["val/perplexity"] == pytest.approx(torch.tensor(val_loss).exp().item(), rel=1e-4)
        assert "perf/tokens_per_s" not in reported[-1], "rows differ in their tokens"


def test_parts_of_the_batch_have_other_numbers_of_labels() -> None:
    """Else the test above would prove nothing."""
    train = Ragged("train")
    order = torch.randperm(48, generator=torch.Generator().manual_seed(0)).view(6, 2, 4)
    counts = [[sum(int((train[i]["labels"] >= 0).sum()) for i in part) for part in step] for step in order.tolist()]
    assert all(first != second for first, second in counts)
    parts = order.view(6, 4, 2, 1)  # of four microbatches on two ranks
    assert any((train[i]["labels"] < 0).all() for i in parts.flatten().tolist()), "a part without any label"


BYTES = ["sharding=per_block reshard_after_forward=always", "sharding=ddp training.grad_accum_steps=2"]


def test_it_holds_what_was_forecast_to_the_byte() -> None:
    assert differences([[*WORDS, *cell.split()] for cell in BYTES]) == []


def test_the_script_that_is_taken_home_has_the_trials_losses() -> None:
    cells = ["sharding=per_block", "sharding=ddp training.grad_accum_steps=2"]
    for result in run_ranks(2, train_and_run, [[*WORDS, *cell.split()] for cell in cells])[0]:
        # of the loss: the first are above 16, where neighbours in float32 are 1.9e-6 apart
        assert apart(result["last"], result["trial"]) <= 1e-6 * max(result["trial"]), result["script"]


def test_another_batch_or_output_is_one_message() -> None:
    from fsdp_lab.config.errors import UserError
    from fsdp_lab.workloads.seq2seq.task import Seq2Seq

    batch = {"input_ids": torch.zeros(2, 3, dtype=torch.int64), "labels": torch.zeros(2, 3, dtype=torch.int64)}
    with pytest.raises(UserError, match=r"got \{input_ids: 2x3 int64, labels: 2x3 int64\}; let data.collate_fn"):
        Seq2Seq().forward(Summariser(), batch)
    with pytest.raises(UserError, match="the model returns a Linear without logits"):
        Seq2Seq().forward(lambda **_: torch.nn.Linear(1, 1), {**batch, "attention_mask": 0})  # type: ignore[arg-type]


def test_one_of_ours_implies_the_task() -> None:
    trial = config("data=pydoc_summaries", f"model._target_={HERE}.Summariser")
    assert trial.task.name == "seq2seq"
