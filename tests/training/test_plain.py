"""The plain loop has the figures of scripts that share nothing with it, and a trial has those of the plain loop."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_lab.config import TrialConfig, part, to_dict
from fsdp_lab.config.metrics import (
    CHANGE_NORM,
    CHECK_VAL_LOSS,
    CHECKED,
    EARLY_LOSS,
    EVAL_LOSS,
    FIRST_GRAD_NORM,
    FIRST_LOSS,
)
from fsdp_lab.training.plain import run
from tests.ranks import config, run_ranks, train_all


class Rows:
    """Eight numbers and a class of three; the class of every fifth row is not known."""

    def __init__(self, split: str) -> None:
        generator = torch.Generator().manual_seed(int(split == "val"))
        self.x = torch.randn(64, 8, generator=generator)
        self.y = torch.randint(3, (64,), generator=generator)
        self.y[::5] = -1

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i], self.y[i]


class Noisy(Rows):
    """Each item is another one whenever it is read."""

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i] + torch.randn(8), self.y[i].clamp(min=0)


class Normed(nn.Module):
    """With batch norm, dropout, and a count of its calls by which its logits grow."""

    def __init__(self, drop: float = 0.0, bias: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8, bias), nn.BatchNorm1d(8)) for _ in range(2))
        self.drop, self.head, self.calls = nn.Dropout(drop), nn.Linear(8, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.drop(torch.tanh(block(x)))
        self.calls += 1
        return self.head(x) * (1 + self.calls / 10)


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y.clamp(min=0))


def loss_in_float32(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x).float(), y.clamp(min=0))


def counted(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    x, y = batch
    return F.cross_entropy(model(x), y, ignore_index=-1, reduction="sum"), (y >= 0).sum()


HERE = ("task=custom", f"task.loss={__name__}.mean_loss", f"data._target_={__name__}.Rows", "data.num_train=null",
        "data.num_val=null", "training.global_batch_size=16", "optimizer.lr=0.01")  # fmt: skip
NORMED = (*HERE, f"model._target_={__name__}.Normed")


def trial(*words: str) -> TrialConfig:
    return part(config(*words), TrialConfig)


def figures(parts: int, *words: str) -> dict[str, float]:
    torch.set_num_threads(1)
    result = run(trial(*words), parts)
    assert not result["missing"], result["missing"]
    return result["figures"]  # type: ignore[no-any-return]


def bare() -> ModuleType:
    """`benchmarks/bare.py`."""
    spec = importlib.util.spec_from_file_location("bare", Path(__file__).parents[2] / "benchmarks" / "bare.py")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


def test_it_trains_what_the_script_of_the_benchmark_trains() -> None:
    script = bare()
    (images, labels), (val_images, val_labels) = script.load_splits()
    model = script.build_model()
    first = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    losses, norms = [], []
    with torch.no_grad():
        before = script.compute_loss(model.eval(), (images[order[:64]], labels[order[:64]]))
    model.train()
    for rows in order[: 3 * 64].split(64):
        losses.append(script.compute_loss(model, (images[rows], labels[rows])))
        optimizer.zero_grad()
        losses[-1].backward()
        norms.append(math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters())))
        optimizer.step()
    change = math.sqrt(
        sum(float((p - w).detach().double().square().sum()) for p, w in zip(model.parameters(), first, strict=True))
    )
    val_loss = script.compute_loss(model.eval(), (val_images[:256], val_labels[:256]))
    assert figures(2, "data.num_train=null", "data.num_val=null", "training.global_batch_size=64") == pytest.approx(
        {
            EVAL_LOSS: float(before),
            FIRST_LOSS: float(losses[0]),
            EARLY_LOSS: float(losses[1] + losses[2]) / 2,
            FIRST_GRAD_NORM: norms[0],
            CHANGE_NORM: change,
            CHECK_VAL_LOSS: float(val_loss),
        },
        rel=1e-6,
    )


class Ranks:
    """Two ranks in one process: each has buffers and a count of its own, which a pass in eval mode leaves alone."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.kept = [self.state() for _ in range(2)]

    def state(self) -> tuple[dict[str, Tensor], Any]:
        return {name: buffer.clone() for name, buffer in self.model.named_buffers()}, self.model.calls

    def use(self, rank: int) -> None:
        buffers, self.model.calls = self.kept[rank]  # type: ignore[assignment]
        self.model.load_state_dict(buffers, strict=False)

    def sum_in_eval_mode(self, rows: Rows, dealt: Sequence[Sequence[Tensor]]) -> float:
        """Over the microbatches of each rank."""
        self.model.eval()
        total = 0.0
        for rank, microbatches in enumerate(dealt):
            self.use(rank)
            total += sum(float(counted(self.model, (rows.x[i], rows.y[i]))[0].detach()) for i in microbatches)
        self.model.train()
        return total


def test_each_rank_has_its_own_buffers_and_labels_weigh_alike() -> None:
    """Two ranks with batch norm and a loss that counts, each with two microbatches, by hand."""
    rows, val = Rows("train"), Rows("val")
    torch.manual_seed(0)
    model, losses = Normed(), list[float]()
    ranks, optimizer = Ranks(model), torch.optim.Adam(model.parameters(), lr=0.01)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    a, b, c, d = order[:16].split(4)
    before = ranks.sum_in_eval_mode(rows, [(a, c), (b, d)]) / int((rows.y[order[:16]] >= 0).sum())
    for batch in order[:48].split(16):
        optimizer.zero_grad()
        total, count = 0.0, int((rows.y[batch] >= 0).sum())
        for rank in range(2):
            ranks.use(rank)
            for microbatch in batch.split(8):
                mine = microbatch.split(4)[rank]
                loss = counted(model, (rows.x[mine], rows.y[mine]))[0] / count
                loss.backward()
                total += float(loss.detach())
            ranks.kept[rank] = ranks.state()
        optimizer.step()
        losses.append(total)
    val_loss = ranks.sum_in_eval_mode(val, [torch.arange(r, 64, 2).split(4) for r in range(2)]) / int(
        (val.y >= 0).sum()
    )
    got = figures(2, *NORMED, f"task.loss={__name__}.counted", "training.grad_accum_steps=2")
    expected = {EVAL_LOSS: before, FIRST_LOSS: losses[0], EARLY_LOSS: sum(losses[1:]) / 2, CHECK_VAL_LOSS: val_loss}
    assert {key: got[key] for key in expected} == pytest.approx(expected, rel=1e-6)


GROUPS = "tests.training.test_groups"
CASES = {
    "ddp": ("sharding=ddp",),
    "per_block": ("sharding=per_block", "training.grad_accum_steps=2", "data.loader_workers=1"),
    "fsdp1": ("sharding=per_block", "sharding.api=fsdp1"),
    "offload": ("sharding=per_layer", "offload=cpu", "training.max_steps=2"),
    "modes": ("sharding=per_block", "optimizer._target_=tests.workloads.user.optim.ScheduleFree", "optimizer.lr=0.3"),
    "groups": (
        "sharding=per_layer",
        "optimizer=adamw",
        "optimizer.weight_decay=0.5",
        f"optimizer.groups={GROUPS}.vectors_apart",
    ),
    "decay": ("sharding=root", "optimizer=adamw", "optimizer.weight_decay=0.5", "optimizer.decay=matrices"),
    "names": ("sharding=ddp", f"optimizer._target_={GROUPS}.NamedAdam"),
    "schedule": (
        "sharding=per_block",
        "lr_schedule._target_=torch.optim.lr_scheduler.OneCycleLR",
        "lr_schedule.max_lr=0.1",
    ),
    "after a step": ("sharding=per_layer", "task.after_step=tests.report.test_pytorch.shrinks"),
    "noisy data": ("sharding=root", f"data._target_={__name__}.Noisy"),
    "dropout": ("sharding=per_block", "model.drop=0.5"),
    **{
        f"in bfloat16, {words[0]}": ("precision=bf16_pure", *words)
        for words in (("sharding=ddp",), ("sharding=root", "training.grad_accum_steps=2"))
    },
}


@pytest.fixture(scope="module")
def first_epochs() -> dict[str, dict[str, float]]:
    trained = run_ranks(2, train_all, [[*NORMED, *words] for words in CASES.values()])[0]
    return {name: reported[0] for name, (_, reported) in zip(CASES, trained, strict=True)}


@pytest.mark.parametrize("name", CASES)
def test_a_trial_takes_its_first_steps(first_epochs: dict[str, dict[str, float]], name: str) -> None:
    got = {key: value for key, value in first_epochs[name].items() if key in CHECKED}
    own = "precision=bf16_pure" in CASES[name]  # whose gradients are rounded once more where ranks add them up
    assert got == pytest.approx(figures(2, *NORMED, *CASES[name]), rel=2**-7 if own else 1e-6)


def test_a_model_in_bfloat16_is_trained_as_a_script_converts_it() -> None:
    """By hand: its parameters, batch norms' statistics and inputs are in bfloat16, and its loss is taken in float32."""
    torch.manual_seed(0)
    model = Normed().to(torch.bfloat16).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    rows, losses = Rows("train"), []
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    for i in order[:48].split(16):
        losses.append(F.cross_entropy(model(rows.x[i].bfloat16()).float(), rows.y[i].clamp(min=0)))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    got = figures(1, *NORMED, f"task.loss={__name__}.loss_in_float32", "precision=bf16_pure")
    assert [got[FIRST_LOSS], got[EARLY_LOSS]] == pytest.approx([float(losses[0]), float(sum(losses[1:]) / 2)], rel=1e-6)


def test_random_numbers_of_a_forward_pass_are_noticed() -> None:
    assert run(trial(*NORMED, "model.drop=0.5"), 2)["draws"]
    assert not run(trial(*NORMED, f"data._target_={__name__}.Noisy"), 2)["draws"], "the data set draws, not the model"


def test_figures_that_rounding_decides_are_known() -> None:
    """A bias before batch norm has no gradient but what is rounded, of which Adam makes whole steps."""
    torch.set_num_threads(1)
    for words, noisy in ((), set()), (("model.bias=true",), {CHANGE_NORM, CHECK_VAL_LOSS}):
        result = run(trial(*NORMED, *words), 2)
        far = {key for key, value in result["figures"].items() if result["noise"][key] > 1e-5 * abs(value)}
        assert far == noisy


def train_with_and_without() -> list[list[float]]:
    cases = [[*NORMED, "model.drop=0.5", "sharding=per_block", *more] for more in ([], ["check=off"])]
    return [losses for losses, _ in train_all(cases)]


def test_a_trial_learns_the_same_without_the_figures() -> None:
    """Buffers, the count of calls and the random numbers are as they were before each pass for the figures."""
    (with_figures, without), _ = run_ranks(2, train_with_and_without)
    assert with_figures == without


def resume(folder: str) -> list[list[dict[str, float]]]:
    """A trial of one epoch, its second, and a trial that starts with the weights of these."""
    words = [*NORMED, "sharding=per_block", "checkpoint.mode=sync"]
    once, again = (train_all([[*words, f"training.epochs={epochs}"]], folder)[0][1] for epochs in (1, 2))
    other = [*words, f"checkpoint.resume_from={folder}/checkpoints"]
    return [once, again, train_all([other], f"{folder}.other")[0][1]]


def test_only_the_start_of_a_trial_has_the_figures(tmp_path: Path) -> None:
    (once, (again, second), other), *_ = run_ranks(2, resume, str(tmp_path / "trial"))
    figures_of = [{key: epoch[key] for key in CHECKED if key in epoch} for epoch in (*once, again, second, *other)]
    assert figures_of[0].keys() == {*CHECKED} and figures_of[1] == figures_of[0]
    assert figures_of[2].keys() == set() and figures_of[3].keys() == {FIRST_LOSS, EARLY_LOSS}


@pytest.mark.parametrize(
    ("words", "options", "missing"),
    [
        ((), {"free_bytes": 2**20}, "needs more than the 0.0 GiB that are free"),
        ((), {"limit_s": 0.0}, "took more than 0 s"),
        ((*NORMED, "model.drop=2"), {}, "ValueError: dropout probability has to be between 0 and 1, but got 2"),
    ],
)
def test_it_says_why_it_has_no_figures(words: tuple[str, ...], options: dict[str, float], missing: str) -> None:
    result = run(trial(*words), 2, **options)
    assert result["figures"] == {} and result["missing"].startswith(missing)


def test_it_is_a_command(tmp_path: Path) -> None:
    asked = {"config": to_dict(trial(*NORMED)), "parts": 2, "limit_s": 60}
    (tmp_path / "in.json").write_text(json.dumps(asked))
    command = [sys.executable, "-m", "fsdp_lab.training.plain", str(tmp_path / "in.json"), str(tmp_path / "out.json")]
    subprocess.run(command, check=True)
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["figures"] == pytest.approx(figures(2, *NORMED), rel=1e-6)
    assert (result["steps"], result["draws"], result["missing"]) == (3, False, "")
    assert [path.name for path in tmp_path.iterdir() if path.name not in ("in.json", "out.json")] == []
