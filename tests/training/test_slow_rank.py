"""A rank that is made slow by a sleep, in its loader or in its model, is named with the part; without one none is."""

from __future__ import annotations

import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_lab.training.slow_rank import _CompleteCollectives, _Own, _slow
from tests import forked
from tests.conftest import HERE, ROOT
from tests.ranks import Memo, config, run_ranks
from tests.servers import lay_store

SLEEP_S = 0.15  # of rank 1, a step


class Rows:
    def __init__(self, split: str, sleeps: bool = False) -> None:
        self.sleeps = sleeps and split == "train" and dist.is_initialized() and dist.get_rank() == 1

    def __len__(self) -> int:
        return 128

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        if self.sleeps:
            time.sleep(SLEEP_S / 8)  # samples of a rank in a step
        return torch.randn(8, generator=torch.Generator().manual_seed(i)), torch.tensor(float(i % 3))


class Block(nn.Module):
    def __init__(self, sleeps: bool) -> None:
        super().__init__()
        self.linear, self.sleeps = nn.Linear(8, 8), sleeps

    def forward(self, x: Tensor) -> Tensor:
        if self.sleeps and self.training and dist.is_initialized() and dist.get_rank() == 1:
            time.sleep(SLEEP_S)
        return torch.tanh(self.linear(x))


class Net(nn.Module):
    def __init__(self, sleeps: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(False), Block(sleeps)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum(-1)


def squares(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def notes_and_figures(cases: list[str]) -> list[tuple[list[str], dict[str, float]]]:
    from fsdp_lab.training.train import train

    found = []
    for words in cases:
        memo = Memo()
        own = (f"model._target_={__name__}.Net", f"data._target_={__name__}.Rows", f"task.loss={__name__}.squares")
        typed = (
            "training.global_batch_size=16",
            "training.epochs=2",
            "data.loader_workers=0",
            "training.timing_warmup_steps=3",
            "memory_profile=peaks",
            *words.split(),
        )
        with tempfile.TemporaryDirectory() as folder:
            train(
                config("data.num_train=128", "data.num_val=16", *own, *typed), Path(folder), memo, lambda losses: None
            )
        found.append((memo.known["notes"], memo.reported[-1]))
    return found


SHARDINGS = ("sharding=per_block", "sharding=ddp", "sharding=per_block sharding.api=fsdp1 precision=bf16_mixed")
IN = {
    "data": ("data.sleeps=true", r"waits [\d.]+ ms a step for its data"),
    "compute": ("model.sleeps=true", "computes"),
}


def test_a_rank_that_sleeps_is_named_with_the_part() -> None:
    cases = [(part, f"{words} {sharding}") for part, (words, _) in IN.items() for sharding in SHARDINGS]
    found = run_ranks(2, notes_and_figures, [words for _, words in cases])
    assert [notes for notes, _ in found[0]] == [notes for notes, _ in found[1]], "each rank knows the same"
    for (part, words), (notes, figures) in zip(cases, found[0], strict=True):
        (note,) = [each for each in notes if "is slower than the others" in each]
        assert note.startswith(f"Rank 1 is slower than the others: it {'waits' if part == 'data' else 'computes'} "), (
            note
        )
        other = "compute" if part == "data" else "data"
        assert figures[f"perf/rank1/{part}_share"] > 0.5 > figures[f"perf/rank1/{other}_share"], (words, figures)
        assert figures["perf/rank0/others_share"] > 0.5 > figures["perf/rank1/others_share"] + 0.3, (words, figures)
        for rank in (0, 1):
            assert 0 < sum(figures[f"perf/rank{rank}/{each}_share"] for each in ("compute", "data", "others")) <= 1


def one(rank: int, node: str, *computing: float, waits_s: float = 0.0) -> _Own:
    return _Own(rank, node, list(computing), [0.0, 0.0], [0.0, 0.0], waits_s)


def two(node: str, seconds: float) -> list[_Own]:
    return [one(rank, node, seconds, seconds) for rank in (0, 1)]


@pytest.mark.parametrize(
    ("everyone", "named"),
    [
        ([one(0, "a", 1.0, 1.0), one(1, "a", 1.0, 1.1)], ""),
        ([one(0, "a", 1.0, 1.0), one(1, "a", 2.0, 2.0)], "Rank 1 is slower than the others: it computes 2e+03 ms"),
        ([one(0, "a", 1.0, 1.0), one(1, "a", 2.0, 1.1)], ""),  # one step alone: noise
        ([one(0, "a", 1.0, 1.0), one(1, "a", 1.9, 1.9), one(2, "b", 2.0, 2.0)], ""),  # two are
        ([one(0, "a", 1.0, 1.0), one(1, "b", 1.0, 1.0), one(2, "b", 2.0, 2.0)], "Rank 2 on node b is slower"),
        (
            [one(0, "a", 1.0, 1.0), one(1, "a", 1.0, 1.0), one(2, "b", 1.3, 1.3), one(3, "b", 1.3, 1.4)],
            "Node b is slower",
        ),
        (
            [one(0, "a", 1.0, 1.0, waits_s=0.2), one(1, "a", 1.0, 1.0)],
            "Rank 0 is slower than the others: it waits 200",
        ),
        ([one(0, "a", 1.0, 1.0, waits_s=0.05), one(1, "a", 1.0, 1.0)], ""),
        ([one(0, "a", 1.0, 1.0, waits_s=0.9), one(1, "a", 1.0, 1.0, waits_s=0.9)], ""),  # all wait
        ([one(0, "a"), one(1, "a")], ""),
    ],
)
def test_who_is_named(everyone: list[_Own], named: str) -> None:
    """By hand, on GPUs: a step takes one second."""
    found = [each["text"] for each in _slow(everyone, 1.0, "cuda")]
    assert found[:1] == [] if not named else found[0].startswith(named)


def test_higher_order_operators_pass() -> None:
    """As of `torch.cond`, and of attention by flex_attention."""
    with _CompleteCollectives(lambda: None) as mode:
        made = torch.cond(torch.ones(()).bool(), lambda x: x * 2, lambda x: x + 0, (torch.ones(2),))
    assert made.tolist() == [2.0, 2.0] and mode.seconds == 0.0


def test_equal_ranks_are_not_named() -> None:
    """On cores that others use one of three may be."""
    found = run_ranks(2, notes_and_figures, 3 * ["sharding=per_block model.sleeps=false"])[0]
    assert sum("is slower than the others" in note for notes, _ in found for note in notes) <= 1
    assert all("perf/rank1/compute_share" in figures for _, figures in found)


@pytest.mark.ci
@pytest.mark.documents("python -m fsdp_lab data._target_=my_project.slow.Rows...")
def test_the_slow_rank_of_the_page_is_named(tmp_path: Path) -> None:
    page = (ROOT / "docs/recipes.md").read_text()
    code, after = page.partition("```python\n# my_project/slow.py\n")[2].split("```\n", 1)
    command, shown = (
        after.partition("python -m ")[2].partition("\n")[0],
        after.partition("] note: ")[2].partition(", the others")[0],
    )
    (tmp_path / "my_project").mkdir()
    (tmp_path / "my_project/slow.py").write_text(code)
    lay_store(tmp_path)
    done = forked.run(tmp_path, *command.split(), *HERE, seconds=200, environment={**os.environ, "COLUMNS": "200"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(re.sub(r"waits [\d.]+", r"waits [\\d.]+", shown), done.stdout), done.stdout
