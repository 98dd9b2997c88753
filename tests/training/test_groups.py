"""Parameter groups and schedules as people write them: each trains as in a plain loop, in every way to shard."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import default_collate

from fsdp_lab.config import ConfigError, UserError
from fsdp_lab.config.rules import check_trial
from fsdp_lab.training.groups import choose_groups
from tests.ranks import config, outcomes, run_ranks, train_all
from tests.training.checkpoints import Job, train_in

Named = Iterable[tuple[str, nn.Parameter]]


class Words:
    def __init__(self, split: str) -> None:
        self.rows = torch.randint(0, 16, (64, 8), generator=torch.Generator().manual_seed(len(split)))

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> Tensor:
        return self.rows[i]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    """Its norms begin far from what decay would leave alone."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.words = nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 16)
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                nn.init.constant_(module.bias, 2.0)

    def forward(self, rows: Tensor) -> Tensor:
        x = self.words(rows)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def next_word(model: nn.Module, rows: Tensor) -> Tensor:
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def by_name(named: Named) -> list[dict[str, Any]]:
    """As transformers' Trainer does."""
    decays, others = [], []
    for name, parameter in named:
        (others if name.endswith("bias") or "norm" in name else decays).append(parameter)
    return [{"params": decays}, {"params": others, "weight_decay": 0.0}]


def by_shape(named: Named) -> list[dict[str, Any]]:
    """As nanoGPT does, with the head at another rate."""
    named = dict(named)
    head = named.pop("head.weight")
    return [
        {"params": [p for p in named.values() if p.dim() >= 2]},
        {"params": [p for p in named.values() if p.dim() < 2], "weight_decay": 0.0},
        {"params": [head], "lr": 0.001},
    ]


def vectors_apart(named: Named) -> list[dict[str, Any]]:
    vectors, others = [], []
    for _, parameter in named:
        (vectors if parameter.dim() < 2 else others).append(parameter)
    return [{"params": others, "lr": 0.002}, {"params": vectors, "weight_decay": 0.0}]


def embeddings_apart(model: Net) -> list[dict[str, Any]]:
    """What `optimizer.decay=matrices optimizer.embedding_lr=0.1` means, by hand."""
    of_block = [p for block in model.blocks for p in block.parameters()]
    return [
        {"params": [model.words.weight], "lr": 0.1},
        {"params": [p for p in (*of_block, model.head.weight) if p.dim() > 1]},
        {"params": [*(p for p in of_block if p.dim() == 1), model.head.bias], "weight_decay": 0.0},
    ]


class NamedAdam(torch.optim.AdamW):
    """Asks for names; biases learn at a tenth."""

    def __init__(self, named_parameters: Named, lr: float) -> None:
        groups: dict[bool, list[nn.Parameter]] = {}
        for name, parameter in named_parameters:
            groups.setdefault(name.endswith("bias"), []).append(parameter)
        super().__init__([{"params": each, "lr": lr / 10 if slow else lr} for slow, each in groups.items()], lr=lr)


def warm_then_fall(optimizer: torch.optim.Optimizer, falls: int) -> lr_scheduler.LRScheduler:
    parts = [lr_scheduler.LinearLR(optimizer, 0.25, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.5)]
    return lr_scheduler.SequentialLR(optimizer, parts, [falls])


class Counts:
    """A factor that has a state: each call is a third less."""

    def __init__(self) -> None:
        self.factor = 1.5

    def __call__(self, step: int) -> float:
        self.factor /= 1.5
        return self.factor


def by_counts(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.LambdaLR(optimizer, Counts())


def waits_for_a_metric(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.ReduceLROnPlateau(optimizer)


Groups = Callable[[Net], Any]
Schedule = Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]
DECAYED = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.5)
CONSTANT = partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 1.0)
ADAMW = "optimizer=adamw optimizer.lr=0.01 optimizer.weight_decay=0.5"
SEQUENTIAL = f"lr_schedule._target_={__name__}.warm_then_fall lr_schedule.falls=4"
ONE_CYCLE = "lr_schedule._target_=torch.optim.lr_scheduler.OneCycleLR lr_schedule.max_lr=0.03"
# What is typed: the same by hand.
CASES: dict[str, tuple[Groups, Any, Schedule]] = {
    f"{ADAMW} optimizer.groups={__name__}.by_name": (lambda m: by_name(m.named_parameters()), DECAYED, CONSTANT),
    f"{ADAMW} optimizer.groups={__name__}.by_shape": (lambda m: by_shape(m.named_parameters()), DECAYED, CONSTANT),
    f"{ADAMW} optimizer.decay=matrices optimizer.embedding_lr=0.1": (embeddings_apart, DECAYED, CONSTANT),
    f"optimizer._target_=torch.optim.RAdam optimizer.lr=0.01 optimizer.weight_decay=0.5 "
    f"optimizer.groups={__name__}.by_shape": (
        lambda m: by_shape(m.named_parameters()),
        partial(torch.optim.RAdam, lr=0.01, weight_decay=0.5),
        CONSTANT,
    ),
    f"optimizer._target_={__name__}.NamedAdam optimizer.lr=0.01": (
        lambda m: [*m.named_parameters()], lambda named: NamedAdam(named, 0.01), CONSTANT,
    ),
    f"{ADAMW} {ONE_CYCLE}": (
        lambda m: m.parameters(), DECAYED, lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.03, total_steps=8),
    ),
    f"{ADAMW} {ONE_CYCLE} training.epochs=5 training.max_steps=8": (
        lambda m: m.parameters(), DECAYED, lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.03, total_steps=8),
    ),
    f"{ADAMW} lr_schedule._target_={__name__}.by_counts": (lambda m: m.parameters(), DECAYED, by_counts),
    f"{ADAMW} {SEQUENTIAL}": (lambda m: m.parameters(), DECAYED, lambda o: warm_then_fall(o, 4)),
    f"{ADAMW} optimizer.groups={__name__}.by_shape lr_schedule._target_=transformers.get_cosine_schedule_with_warmup "
    "lr_schedule.num_warmup_steps=2": (
        lambda m: by_shape(m.named_parameters()),
        DECAYED,
        lambda o: lr_scheduler.LambdaLR(
            o, lambda s: s / 2 if s < 2 else 0.5 * (1 + torch.cos(torch.tensor(torch.pi * (s - 2) / 6)).item())
        ),
    ),
}  # fmt: skip
SHARDINGS = (
    "ddp",
    "per_layer",
    "per_block sharding.api=fsdp1",
    "root offload=cpu",
    "per_block activation_checkpointing=full",
)


def typed(*words: str) -> list[str]:
    return [
        f"model._target_={__name__}.Net", f"model.block_classes=[{__name__}.Block]", f"data._target_={__name__}.Words",
        f"task.loss={__name__}.next_word", "training.epochs=2", "training.global_batch_size=16", "data.num_train=64",
        "data.num_val=64", *" ".join(words).split(),
    ]  # fmt: skip


def by_hand(groups: Groups, optimizer: Any, schedule: Schedule) -> list[float]:
    torch.manual_seed(0)
    model, rows, losses = Net(), Words("train"), []
    made = optimizer(groups(model))
    rates = schedule(made)
    for epoch in range(2):
        for part in torch.randperm(64, generator=torch.Generator().manual_seed(epoch)).split(16):
            loss = next_word(model, default_collate([rows[i] for i in part.tolist()]))
            loss.backward()
            made.step()
            rates.step()
            made.zero_grad()
            losses.append(loss.item())
    return losses


def test_groups_and_schedules_train_as_in_a_plain_loop() -> None:
    cases = [(words, sharding) for words in CASES for sharding in SHARDINGS]
    trained = run_ranks(2, train_all, [typed(words, f"sharding={sharding}") for words, sharding in cases])[0]
    expected = {words: by_hand(*made) for words, made in CASES.items()}
    for (words, sharding), (losses, _) in zip(cases, trained, strict=True):
        assert losses == pytest.approx(expected[words], rel=2e-5), (words, sharding)
    assert len({tuple(losses) for losses in expected.values()}) == len(CASES) - 1, "two cases train the same"


STEPWISE = "lr_schedule._target_=torch.optim.lr_scheduler.MultiStepLR lr_schedule.milestones=[2,4,4,7]"
RESUMED = (SEQUENTIAL, f"{ONE_CYCLE} lr_schedule.total_steps=8", STEPWISE, f"lr_schedule._target_={__name__}.by_counts")


@pytest.mark.parametrize("schedule", RESUMED)
def test_a_schedule_of_the_users_resumes_where_it_was(tmp_path: Path, schedule: str) -> None:
    """And saves again after it has resumed."""
    words = typed(ADAMW, schedule, "sharding=per_block", "checkpoint.mode=sync")
    halves = [[*words, "training.max_steps=5"], words]
    whole, *parts = run_ranks(
        2,
        train_in,
        [Job(str(tmp_path / "a"), words, trial=()), *(Job(str(tmp_path / "b"), each, trial=()) for each in halves)],
    )[0]
    assert [len(each.losses) for each in (whole, *parts)] == [8, 5, 3], [each.error for each in parts]
    assert [*parts[0].losses, *parts[1].losses] == pytest.approx(whole.losses, rel=1e-6)


def test_a_checkpoint_of_other_groups_is_refused(tmp_path: Path) -> None:
    words = typed(ADAMW, "sharding=per_block", "checkpoint.mode=sync")
    started = [*words, "optimizer.decay=matrices", f"checkpoint.resume_from={tmp_path}/a/checkpoints"]
    longer = typed(ADAMW, ONE_CYCLE, "sharding=per_block", "checkpoint.mode=sync")
    jobs = [
        Job(str(tmp_path / "a"), words, trial=()), Job(str(tmp_path / "b"), started, trial=()),
        Job(str(tmp_path / "c"), [*longer, "training.max_steps=3"], trial=()),
        Job(str(tmp_path / "c"), longer, trial=()),
    ]  # fmt: skip
    _, refused, _, late = run_ranks(2, train_in, jobs)[0]
    assert "optimizer.decay=all in the checkpoint, matrices now" in refused.error
    assert "OneCycleLR fails after step" in late.error and "Tried to step" in late.error


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (f"lr_schedule._target_={__name__}.waits_for_a_metric", "returns a ReduceLROnPlateau; it must return"),
        ("lr_schedule._target_=torch.optim.lr_scheduler.StepLR", "needs lr_schedule.step_size, which has no default"),
        ("lr_schedule._target_=torch.optim.lr_scheduler.StepLR lr_schedule.steps=2", "StepLR has no parameter steps"),
        ("lr_schedule=custom", "lr_schedule._target_ is not set"),
        ("lr_schedule.gama=2", "lr_schedule.gama is not a key"),
        (f"optimizer.groups={__name__}.by_name optimizer.decay=matrices", "the function chooses what decays"),
        ("optimizer.groups=nothing.here", "cannot be imported"),
    ],
)
def test_what_is_no_group_or_schedule_is_refused(words: str, said: str) -> None:
    if "metric" in words:  # found when it is built
        ((found,),) = run_ranks(1, outcomes, [typed(words, "sharding=ddp")])
        assert said in found
        return
    with pytest.raises(ConfigError, match=re.escape(said)):
        check_trial(config(*typed(words)), 2)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda named: [{"params": [p for _, p in named][1:]}], "leaves out words.weight; give each parameter a group"),
        (lambda named: [{"params": [p for _, p in named]}, {"params": [named[0][1]]}], "puts words.weight into two"),
        (lambda named: [{"params": [nn.Parameter(torch.ones(1))]}], "returns what is no trained parameter"),
        (lambda named: [p for _, p in named], "fails: "),
        (lambda named: [{"params": named[0][1]}], "leaves out blocks.0.norm.weight and 9 more"),
        (lambda named: None, "fails: TypeError"),
    ],
)
def test_groups_hold_each_trained_parameter_once(monkeypatch: pytest.MonkeyPatch, returned: Any, said: str) -> None:
    monkeypatch.setitem(globals(), "by_name", returned)
    from fsdp_lab.config import target

    target.import_object.cache_clear()
    asked = config(*typed(f"optimizer.groups={__name__}.by_name")).optimizer
    with pytest.raises(UserError, match=re.escape(said)):
        choose_groups(Net(), asked, 1)
    target.import_object.cache_clear()


def test_a_rate_of_embeddings_grows_with_the_workers_as_others_do() -> None:
    asked = config("optimizer.embedding_lr=0.1", "optimizer.scale_lr=true").optimizer
    groups = choose_groups(Net(), asked, 4)
    assert [(names, options) for names, options in groups if options] == [(["words.weight"], {"lr": 0.4})]
    with pytest.raises(ConfigError):
        check_trial(config("optimizer.embedding_lr=-1"), 2)
    with pytest.raises(UserError, match="the model trains no nn"):
        choose_groups(Block(8), asked, 4)
