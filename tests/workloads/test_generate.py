"""`generate` of transformers in a metric: by the model's own forward, in every sharding; else it is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ranks import outcomes, run_ranks, train_all

transformers: Any = pytest.importorskip("transformers")
SIZES = {"vocab_size": 32, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 0,
         "eos_token_id": 1, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip


class Writer(transformers.GPT2LMHeadModel):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(transformers.GPT2Config(**SIZES))

    def forward(self, *args: Any, prompt: Tensor | None = None, **kwargs: Any) -> Any:
        if prompt is None:
            return super().forward(*args, **kwargs)
        return self.generate(prompt, max_new_tokens=6, min_new_tokens=6, do_sample=False)


class Rows:
    def __init__(self, split: str) -> None:
        self.rows = torch.randint(2, 32, (64, 16), generator=torch.Generator().manual_seed(len(split)))

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss  # type: ignore[no-any-return]


def written(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    rows = model(prompt=batch["input_ids"][:, :4])
    return {"token": (rows.double().sum(), torch.tensor(float(rows.numel())))}


def outside(model: Any, batch: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    rows = model.generate(batch["input_ids"][:, :4], max_new_tokens=6)
    return {"token": (rows.sum(), torch.tensor(float(rows.numel())))}


def words(metrics: str, sharding: str) -> list[str]:
    return [
        f"model._target_={__name__}.Writer", f"data._target_={__name__}.Rows", f"task.loss={__name__}.loss",
        f"task.metrics={__name__}.{metrics}", "training.global_batch_size=16", "data.num_train=64", "data.num_val=64",
        "training.epochs=1", *sharding.split(),
    ]  # fmt: skip


SHARDINGS = ("ddp", "per_block", "root reshard_after_forward=never", "per_block sharding.api=fsdp1")


def test_a_metric_generates_by_the_models_forward() -> None:
    cases = [words("written", f"sharding={each}") for each in SHARDINGS]
    (alone,) = run_ranks(1, train_all, [words("written", "sharding=ddp")])[0]
    for sharding, (_, reported) in zip(SHARDINGS, run_ranks(2, train_all, cases)[0], strict=True):
        assert reported[-1]["val/token"] == pytest.approx(alone[1][-1]["val/token"]), sharding


def test_generate_outside_of_the_forward_is_refused() -> None:
    (found,) = run_ranks(2, outcomes, [words("outside", "sharding=per_block")])[0]
    assert "task.metrics uses model.generate outside model(...)" in str(found) and "move it into forward" in str(found)
