"""Sharded as training shards it, a language model learns what one process learns, step by step."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_lab.training.distributed import build_parallel_dims, setup_distributed
from fsdp_lab.training.parallelize import apply_ddp, apply_fully_shard, apply_to_blocks
from fsdp_lab.workloads.language.llama import Block, Llama
from fsdp_lab.workloads.language.task import Language
from tests.ranks import config, run_ranks
from tests.workloads.language.test_llama import small

Case = tuple[str, str, str, bool, int]  # sharding, reshard_after_forward, activation_checkpointing, tied, loss_chunks
# per_layer shards embedding and head apart, which a tied table cannot be
CASES: list[Case] = [
    (sharding, reshard, recompute, tied, chunks)
    for sharding, reshard, recompute, tied, chunks in product(
        ("ddp", "root", "per_block", "per_layer"), ("always", "never"), ("none", "full"), (False, True), (1, 3)
    )
    if not (sharding == "per_layer" and tied) and not (sharding == "ddp" and reshard == "never")
]
ROWS = torch.randint(50, (8, 17), generator=torch.Generator().manual_seed(5))


Learned = tuple[list[float], list[Tensor]]  # the loss of each step, and the gradients of the first


def learn(model: nn.Module, rows: Tensor, chunks: int, steps: int = 3) -> tuple[Tensor, list[Tensor]]:
    """Train on the same rows again and again; the loss of each step, of these rows, and the first gradients."""
    # Weight decay in the gradient and a large step: Adam would forgive a gradient that is wrong by a factor
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.1)
    task, losses, first = Language(loss_chunks=chunks), [], []
    for _ in range(steps):
        loss = task.loss(task.forward(model, rows), rows)
        loss.backward()
        first = first or [whole(p.grad).clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses), first


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def learn_sharded(cases: list[Case]) -> list[Learned]:
    """On each rank: its half of the rows, and the mean of both ranks' losses."""
    ranks, collected = setup_distributed(), []
    for sharding, reshard, recompute, tied, chunks in cases:
        trial = config(
            f"sharding={sharding}", f"reshard_after_forward={reshard}", f"activation_checkpointing={recompute}"
        )
        model: nn.Module = small(tied=tied)
        dims = build_parallel_dims(trial.sharding, ranks)
        assert isinstance(model, Llama) and dims.mesh is not None
        apply_to_blocks(model, (Block,), trial)
        apply_fully_shard(model, (Block,), trial, dims.mesh)
        losses, gradients = learn(apply_ddp(model, trial, ranks.device), ROWS.chunk(2)[ranks.rank], chunks)
        dist.all_reduce(losses)
        collected.append(((losses / 2).tolist(), gradients))
    return collected


@pytest.fixture(scope="module")
def sharded() -> dict[Case, Learned]:
    first, second = run_ranks(2, learn_sharded, CASES)
    assert [losses for losses, _ in first] == [losses for losses, _ in second]
    return dict(zip(CASES, first, strict=True))


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def unsharded(request: pytest.FixtureRequest) -> tuple[bool, list[float], list[Tensor]]:
    torch.set_num_threads(1)
    losses, gradients = learn(small(tied=request.param), ROWS, chunks=1)
    return request.param, losses.tolist(), gradients


def test_sharded_losses_are_those_of_one_process(
    sharded: dict[Case, Learned], unsharded: tuple[bool, list[float], list[Tensor]]
) -> None:
    tied, expected, _ = unsharded
    assert expected[-1] < expected[0] - 0.3, "it learns"
    for case, (losses, _) in sharded.items():
        if case[3] is tied:
            assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < 1e-5, case


def test_a_loss_in_parts_has_the_gradients_of_the_whole_on_every_sharding(
    sharded: dict[Case, Learned], unsharded: tuple[bool, list[float], list[Tensor]]
) -> None:
    tied, _, expected = unsharded
    for case, (_, gradients) in sharded.items():
        if case[3] is tied:
            for got, want in zip(gradients, expected, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-7, msg=lambda m, c=case: f"{c}: {m}")
