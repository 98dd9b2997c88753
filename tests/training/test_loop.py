"""What a step and an epoch report beside the loss."""

from __future__ import annotations

import math
from collections import Counter
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_lab.training import loop
from fsdp_lab.training.loop import token_metrics
from fsdp_lab.workloads.base import Task
from tests.operators import Operators
from tests.parity import WORKLOADS
from tests.ranks import config, run_ranks, train_all
from tests.training.reference import digits, first_weights

MLP = ("model=mlp", "training.max_steps=1", "memory_profile=off")
CASES = [
    [*MLP, "training.max_grad_norm=0.1", "sharding=ddp"],
    [*MLP, "training.max_grad_norm=0.1", "sharding=per_layer"],
    [*MLP, "training.max_grad_norm=0.1", "sharding=root", "training.grad_accum_steps=2"],
    [*MLP, "training.max_grad_norm=1e9", "sharding=per_block"],
    [*MLP, "training.max_grad_norm=1e9", "sharding=per_block", "precision=fp16"],
    [*MLP, "sharding=per_block"],
]


def norm_by_hand() -> float:
    """Of the gradients of the first step's 32 digits, by one process, as a sum of squares."""
    from fsdp_lab.workloads.build import build_model_spec

    trial = config(*MLP)
    model = build_model_spec(trial.model).build()
    model.load_state_dict(first_weights(trial))
    (images, labels), _ = digits()
    first = torch.randperm(128, generator=torch.Generator().manual_seed(0))[:32]
    size = trial.model.sizes()["image_size"]
    images = nn.functional.interpolate(images[first], size=(size, size), mode="bilinear")
    nn.functional.cross_entropy(model(images), labels[first]).backward()
    return math.sqrt(sum(p.grad.double().square().sum().item() for p in model.parameters()))


def test_the_norm_of_the_gradients_is_that_before_clipping_over_all_ranks() -> None:
    results = [reported for _, reported in run_ranks(2, train_all, CASES)[0]]
    expected = norm_by_hand()
    assert expected > 0.2, "it is clipped"
    for case, reported in zip(CASES[:4], results, strict=False):
        assert reported[-1]["train/grad_norm"] == pytest.approx(expected, rel=1e-5), case
    assert results[4][-1]["train/grad_norm"] == pytest.approx(expected, rel=1e-2), "unscaled"
    assert "train/grad_norm" not in results[5][-1], "it would cost a pass over the gradients"
    assert results[3][-1]["val/loss"] == pytest.approx(results[5][-1]["val/loss"], abs=1e-6), "nothing was clipped"
    assert all(0 <= reported[-1].get("perf/data_wait_share", 0) <= 1 for reported in results)


def reductions_of_a_step(cases: list[list[str]]) -> list[dict[str, int]]:
    """The collectives that reduce gradients: of more than a few numbers, which a loss has."""
    results: list[Counter[str]] = []

    def note(name: str, args: Any, _: Any) -> None:
        if name in ("c10d::allreduce_", "c10d::_reduce_scatter_base_"):
            tensor = args[0][0] if name == "c10d::allreduce_" else args[0]
            results[-1][name.removeprefix("c10d::")] += tensor.numel() > 100

    for case in cases:
        results.append(Counter())
        with Operators(note):
            train_all([case])
    return [dict(counts) for counts in results]


def test_replicas_reduce_once_a_step_and_shards_each_microbatch() -> None:
    """Two blocks and the root, four microbatches: only what `sync_each_microbatch` promises grows with these."""
    hybrid = (*MLP, "model.num_layers=2", "sharding.dp_replicate=2", "training.grad_accum_steps=4")
    cases = [[*hybrid, f"training.sync_each_microbatch={each}"] for each in ("true", "false")]
    for each, last in run_ranks(4, reductions_of_a_step, cases):
        assert each == {"allreduce_": 3, "_reduce_scatter_base_": 12}
        assert last == {"allreduce_": 3, "_reduce_scatter_base_": 3}


HALVES = ("bf16", "fp16_mixed")  # in which what a model returns is computed
OURS = {
    "classification": MLP,
    "language": (*WORKLOADS["language"].words, *MLP[1:]),
    "language in chunks": (*WORKLOADS["language"].words, *MLP[1:], "task.loss_chunks=2"),
    "seq2seq": (*WORKLOADS["seq2seq"].words, *MLP[1:]),
}
THEIRS = (*MLP, "task.loss=tests.workloads.user.my_project.net.labels")


def test_the_type_of_a_loss_is_recorded_where_it_rounds() -> None:
    """A user's cross entropy of FSDP2's bfloat16 outputs; under DDP autocast computes it in float32."""
    theirs = {
        "sharding=per_block precision=bf16": 2.0**-7,
        "sharding=per_block precision=fp16 training.grad_accum_steps=2": 2.0**-10,
        "sharding=per_block precision=fp32": None,
        "sharding=ddp precision=bf16": None,
    }
    cases = [[*THEIRS, *words.split()] for words in theirs]
    ours = [[*words, f"precision={precision}"] for words in OURS.values() for precision in HALVES]
    trained = run_ranks(2, train_all, [*cases, *ours])[0]
    results = [reported[-1].get("train/loss_eps") for _, reported in trained]
    assert results[: len(theirs)] == list(theirs.values())
    assert results[len(theirs) :] == [None] * len(ours), "our losses are float32"
    for losses, reported in trained:
        assert reported[0]["train/first_loss"] == losses[0]
        assert reported[0].get("train/early_loss") == (pytest.approx(fmean(losses[1:3])) if losses[1:] else None)


def test_ranks_may_have_other_metrics_and_none_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """This rank saw metrics `b` and `empty`; the other one saw `a`, with a sum of 6 over 2."""
    other = {"a": (6.0, 2.0), "loss": (3.0, 1.0)}
    monkeypatch.setattr(loop, "gather", lambda names: [names, [*other]])

    class Named(Task):
        def forward(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            return batch

        def metrics(self, outputs: torch.Tensor, batch: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
            one = torch.tensor(1)
            return {"loss": (one, one), "b": (4 * one, one), "empty": (0 * one, 0 * one)}

    class Dims:
        def sum(self, values: torch.Tensor) -> torch.Tensor:
            names = ["a", "b", "empty", "loss"]
            return values + torch.tensor([other.get(name, (0.0, 0.0)) for name in names], dtype=values.dtype)

    state = SimpleNamespace(model=nn.Identity(), step=1)
    reported = loop.evaluate(state, Named(), [torch.zeros(1)], config(), torch.device("cpu"), Dims())
    assert reported == {"val/a": 3.0, "val/b": 4.0, "val/loss": 2.0}


def test_perplexity_and_bits_per_byte() -> None:
    """A loss of ln 8 is a choice among 8 tokens: three bits, for four bytes."""
    assert token_metrics(math.log(8), 4.0) == pytest.approx({"val/perplexity": 8, "val/bits_per_byte": 0.75})
    assert token_metrics(math.log(8), None) == pytest.approx({"val/perplexity": 8})
    assert math.isfinite(token_metrics(1e6, 1.0)["val/perplexity"])
