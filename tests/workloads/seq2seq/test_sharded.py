"""A task whose rows have any number of labels: its script, and its refusals. What it learns and holds:
`tests/training/test_parity.py`."""

from __future__ import annotations

import pytest
import torch

from tests.parity import VIT, WORKLOADS
from tests.ranks import config, run_ranks
from tests.takehome.scripts import train_and_run
from tests.training.reference import apart
from tests.workloads.seq2seq.net import Ragged, Summariser

WORDS = [*WORKLOADS["seq2seq"].words, *VIT]


def test_parts_of_the_batch_have_other_numbers_of_labels() -> None:
    """Else the losses of `tests/training/test_parity.py` would prove nothing."""
    train = Ragged("train")
    order = torch.randperm(48, generator=torch.Generator().manual_seed(0)).view(6, 2, 4)
    counts = [[sum(int((train[i]["labels"] >= 0).sum()) for i in part) for part in step] for step in order.tolist()]
    assert all(first != second for first, second in counts)
    parts = order.view(6, 4, 2, 1)  # of four microbatches on two ranks
    assert any((train[i]["labels"] < 0).all() for i in parts.flatten().tolist()), "a part without any label"


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
    trial = config("data=pydoc_summaries", "model._target_=tests.workloads.seq2seq.net.Summariser")
    assert trial.task.name == "seq2seq"
