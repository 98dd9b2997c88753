"""Each workload learns sharded what a plain script learns, and holds what was forecast to the byte: a model of images,
one of language, and a user's files. Of `vit_tiny` the same is in `tests/training` and `tests/forecast`, with more axes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import default_collate

from fsdp_lab.forecast.forecast import forecast_profile
from fsdp_lab.workloads.language.llama import Llama
from fsdp_lab.workloads.language.pydoc import PydocTokens
from tests.forecast.test_equality import differences
from tests.ranks import config, run_ranks, train_all
from tests.training.reference import apart, build_optimizer, train_unsharded
from tests.workloads.user.odd import Odd, Rows, Translator, loss

HERE = "tests.workloads.user.odd"
LEARN = ["optimizer=adam", "optimizer.lr=0.01", "optimizer.weight_decay=0.1", "training.epochs=2"]
LLAMA = {"dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 48, "max_seq_len": 16}
USER = [f"data._target_={HERE}.Rows", f"task.loss={HERE}.loss"]


def next_token(model: nn.Module, rows: Tensor) -> Tensor:
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


@dataclass(frozen=True)
class Script:
    """What a plain script needs of a workload; `split`: the items of `train` or `val`."""

    build: Callable[[], nn.Module]
    split: Callable[[str], Any]
    loss: Callable[[nn.Module, Tensor], Tensor]

    def train(self, *words: str) -> tuple[list[float], float]:
        """Return the loss of every step and that of the validation split, unsharded and in float32."""
        trial = config(*words)
        train, val = self.split("train"), self.split("val")
        count, batch = min(len(train), trial.data.num_train or len(train)), trial.training.global_batch_size
        torch.manual_seed(trial.training.seed)
        model, losses = self.build(), []
        optimizer = build_optimizer(model, trial)
        for epoch in range(trial.training.epochs):
            generator = torch.Generator().manual_seed(trial.training.seed * 1_000_003 + epoch)
            order = torch.randperm(count, generator=generator)
            for indices in order[: count // batch * batch].split(batch):
                optimizer.zero_grad()
                value = self.loss(model, default_collate([train[i] for i in indices.tolist()]))
                value.backward()
                optimizer.step()
                losses.append(value.item())
        model.eval()
        with torch.no_grad():
            items = [val[i] for i in range(min(len(val), trial.data.num_val or len(val)))]
            return losses, self.loss(model, default_collate(items)).item()


def train_mlp(*words: str) -> tuple[list[float], float]:
    run = train_unsharded(config(*words))
    return run.losses, run.val_loss


llama = partial(Llama, vocab_size=256, rope_theta=10000.0, norm_eps=1e-5, tied=True, **LLAMA)
# What is typed, and a plain script.
WORKLOADS: dict[str, tuple[list[str], Callable[..., tuple[list[float], float]]]] = {
    "mlp": (["model=mlp", "model.image_size=8", "model.hidden_dim=32", "model.num_layers=2"], train_mlp),
    "language": (
        ["task=language", "data.seq_len=16", "model.tied=true", *(f"model.{k}={v}" for k, v in LLAMA.items())],
        Script(llama, partial(PydocTokens, seq_len=16), next_token).train,
    ),
    "user": ([f"model._target_={HERE}.Odd", *USER], Script(Odd, Rows, loss).train),
    "user, as T5": ([f"model._target_={HERE}.Translator", *USER], Script(Translator, Rows, loss).train),
}
SHARDINGS = ("root", "per_block", "per_layer", "size_based sharding.min_num_params=80")
RESHARDS = ("always", "never", "default", "to_size reshard_after_forward.size=2")
GRID = [
    "sharding=ddp",
    *(f"sharding={sharding} reshard_after_forward={reshard}" for sharding, reshard in product(SHARDINGS, RESHARDS)),
    "sharding=per_block init=meta",
    "sharding=per_block activation_checkpointing=full training.grad_accum_steps=2",
]


@pytest.fixture(scope="module")
def sharded() -> dict[str, list[tuple[list[float], float]]]:
    """Of each workload and each cell of the grid: the losses of the steps, and that of the validation."""
    cases = [[*words, *LEARN, *cell.split()] for words, _ in WORKLOADS.values() for cell in GRID]
    first, second = run_ranks(2, train_all, cases)
    assert [losses for losses, _ in first] == [losses for losses, _ in second]
    results = iter(first)
    return {
        name: [(losses, reported[-1]["val/loss"]) for losses, reported in (next(results) for _ in GRID)]
        for name in WORKLOADS
    }


@pytest.mark.parametrize("name", WORKLOADS)
def test_sharded_it_learns_what_a_plain_script_learns(sharded: dict[str, Any], name: str) -> None:
    torch.set_num_threads(1)
    words, script = WORKLOADS[name]
    losses, val_loss = script(*words, *LEARN)
    assert len(losses) >= 4 and losses[-1] < losses[0]
    for cell, (got, got_val) in zip(GRID, sharded[name], strict=True):
        assert apart(got, losses) <= 1e-5, (cell, got, losses)
        assert abs(got_val - val_loss) <= 1e-5, (cell, got_val, val_loss)


BYTES = [
    *(f"sharding={sharding} reshard_after_forward={reshard}" for sharding, reshard in product(SHARDINGS, RESHARDS)),
    "sharding=ddp",
    "sharding=ddp optimizer=sgd precision=bf16_mixed training.max_grad_norm=1",
    "sharding=per_block precision=bf16 offload=cpu activation_checkpointing=full",
    "sharding=root precision=fp16_mixed precision.init_scale=8 training.grad_accum_steps=2",
]


@pytest.mark.parametrize("name", ["language", "user", "user, as T5"])
def test_it_holds_what_was_forecast_to_the_byte(name: str) -> None:
    words, _ = WORKLOADS[name]
    assert differences([[*words, *cell.split()] for cell in BYTES], ranks=1) == []


def test_ddp_with_a_parameter_without_gradient_is_forecast() -> None:
    forecast_profile(config(*WORKLOADS["user"][0], "sharding=ddp"), 2, cuda=False)


DROPOUT = [f"model._target_={HERE}.Odd", "model.dropout=0.5", *USER, "training.global_batch_size=8", *LEARN]
DROPPED: Sequence[str] = ("sharding=ddp", *(f"sharding={s}" for s in SHARDINGS), "sharding=per_block init=meta",
                          "sharding=per_block activation_checkpointing=full")  # fmt: skip


def test_dropout_is_the_same_in_every_sharding_of_as_many_workers() -> None:
    cases = [[*DROPOUT, *cell.split()] for cell in DROPPED]
    (first, *others) = (losses for losses, _ in run_ranks(2, train_all, cases)[0])
    for cell, losses in zip(DROPPED[1:], others, strict=True):
        assert apart(losses, first) <= 1e-5, cell
    (alone, _), (without, _) = run_ranks(1, train_all, [cases[0], [*cases[0], "model.dropout=0"]])[0]
    assert apart(first, alone) > 1e-3, "other workers, other masks: docs/your-model.md says so"
    assert apart(alone, without) > 1e-2, "it does drop"


@pytest.mark.parametrize("sharding", ["ddp", "per_block"])
def test_dropout_goes_on_in_the_middle_of_an_epoch_as_if_never_stopped(sharding: str, tmp_path: Path) -> None:
    """To the bit. An epoch has eight steps."""
    words = [*DROPOUT, f"sharding={sharding}", "checkpoint.mode=sync"]
    ((whole, _),) = run_ranks(2, train_all, [words])[0]
    folder = str(tmp_path)
    (begun, _), (resumed, _) = run_ranks(2, train_all, [[*words, "training.max_steps=3"], words], folder)[0]
    assert len(whole) == 16 and [*begun, *resumed] == whole
