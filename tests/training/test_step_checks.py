"""Models that compute something else when they are sharded: refused with the names of what is to be changed."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_lab.config import UserError
from fsdp_lab.training.step_checks import EVERY, FIRST_STEPS
from tests.parity import differences
from tests.ranks import run_ranks, train_all
from tests.workloads.user.odd import VOCABULARY, WIDTH, Rows, loss

__all__ = ["Rows", "loss"]  # named in the commands below


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + torch.tanh(self.changed(x))

    def changed(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Model(nn.Module):
    block = Block

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.steps = 0

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        self.steps += self.training
        x = self.hidden(self.embedding(tokens))
        return self.head(x), x

    def hidden(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Experts(Model):
    """From a step on each rank uses one of two blocks; `since=None`: only in an evaluation."""

    def __init__(self, since: int | None) -> None:
        super().__init__()
        self.since = since

    def hidden(self, x: Tensor) -> Tensor:
        differs = not self.training if self.since is None else self.steps >= self.since
        return self.blocks[2](self.blocks[dist.get_rank() if differs else 0](x))


class Dropped(Model):
    def hidden(self, x: Tensor) -> Tensor:
        for block in self.blocks[: 3 - dist.get_rank()]:
            x = block(x)
        return x


class Gated(Block):
    def changed(self, x: Tensor) -> Tensor:
        return self.first(x) if dist.get_rank() else self.second(x)


class Uneven(Block):
    def changed(self, x: Tensor) -> Tensor:
        return self.first(x) if dist.get_rank() else super().changed(x)


class GatedOnce(Gated):
    """Only in step 5: gradients of the same size, so the reductions do not differ."""

    def changed(self, x: Tensor) -> Tensor:
        return super().changed(x) if self.calls == 5 else Block.changed(self, x)


class Inside(Model):
    block = Gated


class InsideOnce(Model):
    block = GatedOnce


class InsideUneven(Model):
    block = Uneven


class Scaled(Block):
    def changed(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.first.weight.mul_(0.9)
        return super().changed(x)


class Writes(Model):
    block = Scaled


class Unfrozen(Block):
    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)

    def changed(self, x: Tensor) -> Tensor:
        if self.calls > 5:
            self.first.bias.requires_grad_(True)
        return super().changed(x)


class Unfreezes(Model):
    block = Unfrozen


class UnfreezesBlocks(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks.requires_grad_(False)

    def hidden(self, x: Tensor) -> Tensor:
        if self.steps > 5:
            self.blocks.requires_grad_(True)
        return super().hidden(x)


class Frozen(Model):
    """What is allowed: a block that is frozen later, and teachers whose shards are written."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = Block().requires_grad_(False)

    def hidden(self, x: Tensor) -> Tensor:
        if self.steps > 5:
            self.blocks[0].requires_grad_(False)
        with torch.no_grad():
            for mine, other in zip(self.teacher.parameters(), self.blocks[1].parameters(), strict=True):
                mine.lerp_(other, 0.5)
        return super().hidden(x) + self.teacher(x)


HERE = __name__


def words(model: str, *more: str) -> list[str]:
    data = (f"data._target_={HERE}.Rows", f"task.loss={HERE}.loss", "data.num_train=64", "data.num_val=8")
    return [f"model._target_={HERE}.{model}", *data, "training.global_batch_size=4", "training.epochs=2", *more]


def refusals(cases: list[list[str]]) -> list[str]:
    """Of each case the message and the step on this rank; in one process group, since ranks end together."""
    found = []
    for case in cases:
        try:
            train_all([case])
            found.append("")
        except UserError as error:
            found.append(f"{error} {getattr(error, '__notes__', '')}")
    return found


BLOCK, ROOT = "sharding=per_block", "sharding=root"
AT_FIRST = r"step 1 rank 0 gathers the weights of blocks\.0, and rank 1 gathers the weights of blocks\.1"
LATER = r"rank 0 gathers the weights of blocks\.[01] \d+ times and rank 1 \d+ times.*use sharding=ddp"
IN_EVALUATION = r"step 16 rank 0 gathers .* blocks\.0, and rank 1 .* blocks\.1"
GRADIENT, WRITTEN = (
    r"blocks\.0\.first\.weight has a gradient on rank 1",
    r"blocks\.0\.first\.weight was written in a forward",
)
UNFROZEN = r"blocks\.0\.first\.(bias|weight) requires a gradient by step 6,.*checkpoint\.resume_from"
REFUSED: list[tuple[list[str], str]] = [
    (words("Experts", "model.since=1", BLOCK), AT_FIRST),
    (words("Experts", f"model.since={EVERY + 5}", BLOCK, "memory_profile=peaks"), LATER),
    (words("Experts", "model.since=null", BLOCK), IN_EVALUATION),
    (words("Dropped", BLOCK), r"step 1 rank 0 gathers the weights of blocks\.2, and rank 1 has ended its forward pass"),
    (words("Inside", BLOCK), f"{GRADIENT} and none on rank 0"),
    (words("Inside", ROOT, "training.grad_accum_steps=2"), GRADIENT),
    (words("InsideOnce", BLOCK), f"{GRADIENT} and none on rank 0"),
    (words("InsideUneven", BLOCK), r"rank 0 reduces 144 gradients of blocks\.2, and rank 1 reduces 72 gradients of"),
    (words("Writes", BLOCK, "reshard_after_forward=never"), WRITTEN),
    (words("Writes", ROOT, "memory_profile=peaks"), WRITTEN),
    (words("Writes", BLOCK, "activation_checkpointing=full", "precision=bf16"), WRITTEN),
    *((words("Unfreezes", sharding), UNFROZEN) for sharding in (BLOCK, ROOT, "sharding=ddp")),
    *((words("UnfreezesBlocks", sharding), UNFROZEN) for sharding in (BLOCK, "sharding=ddp")),
]


@pytest.fixture(scope="module")
def messages() -> list[list[str]]:
    return run_ranks(2, refusals, [case for case, _ in REFUSED])


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=[" ".join(case) for case, _ in REFUSED])
def test_what_computes_something_else_is_refused_by_its_name(messages: list[list[str]], number: int) -> None:
    for of_rank in messages:
        assert re.search(REFUSED[number][1], of_rank[number]), of_rank[number]


def test_what_is_kept_is_not_refused() -> None:
    """DDP keeps writes and lets ranks differ; FSDP2 allows to freeze, and to write shards."""
    of_ddp = [words(model, "sharding=ddp") for model in ("Writes", "Dropped", "Inside")]
    cases = [*of_ddp, words("Frozen", BLOCK), words("Frozen", "sharding=per_layer")]
    assert run_ranks(2, refusals, cases) == [[""] * len(cases)] * 2


def test_all_settings_are_timed_over_the_same_steps() -> None:
    cases = [["model=mlp", "training.timing_warmup_steps=0", sharding] for sharding in ("sharding=ddp", BLOCK, ROOT)]
    trained = run_ranks(2, train_all, cases)[0]
    assert [epochs[-1]["perf/timed_steps"] for _, epochs in trained] == [4 - FIRST_STEPS] * 3


class Forces(Model):
    """Takes the gradient of a block inside of its forward pass; its embedding has sparse gradients."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, sparse=sparse)

    def hidden(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            at = x.detach().requires_grad_(True)
            (force,) = torch.autograd.grad(super().hidden(at).pow(2).sum(), at, create_graph=True)
        return super().hidden(x - 0.1 * force)


def test_gradients_in_a_forward_pass_and_sparse_ones_are_followed() -> None:
    """The tracker failed each of these trials; with it they learn what they learn without."""
    sgd = ("optimizer=sgd", "optimizer.weight_decay=0", "optimizer.lr=0.05")
    settings = (("model.sparse=true", "sharding=ddp"), ("model.sparse=false", ROOT))
    cases = [words("Forces", *s, f"memory_profile={d}", *sgd) for s in settings for d in ("off", "peaks")]
    (sparse, sparse_followed), (root, followed) = (run_ranks(2, train_all, cases)[0][i : i + 2] for i in (0, 2))
    for plain, tracked in ((sparse, sparse_followed), (root, followed)):
        assert plain[0] == tracked[0]
        assert tracked[1][-1]["memory/peak_bytes"] > 0


def test_the_comparison_holds_no_memory() -> None:
    """A forecast has none."""
    assert differences([words("Model", BLOCK, "training.max_grad_norm=0.1", "sharding.dp_replicate=2")], 4) == []
