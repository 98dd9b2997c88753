"""A function of the user's after each step: moving averages in the model are a plain loop's, saved and exported."""

from __future__ import annotations

import copy
import io
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import default_collate

from fsdp_lab.config import ConfigError
from fsdp_lab.config.rules import check_trial
from tests.ranks import config, outcomes, run_ranks, train_leaving
from tests.training.checkpoints import Job, train_in

DECAY = 0.7


class Rows:
    def __init__(self, split: str) -> None:
        self.x = torch.randn(64, 8, generator=torch.Generator().manual_seed(len(split)))

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i], self.x[i].sum().tanh()


class Block(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x))


class Net(nn.Module):
    """With its own average, which no step of the optimizer changes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(8, 8), Block(8, 8), Block(8, 8)])
        self.average = copy.deepcopy(self.blocks).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Of the average in validation; in training it teaches, too."""
        teacher = x
        for block in self.average:
            teacher = block(teacher)
        if not self.training:
            return teacher.mean(-1)
        for block in self.blocks:
            x = block(x)
        return x.mean(-1) + 0.1 * (x - teacher).square().mean(-1)


def squares(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def average(parts: Mapping[str, Any], step: int) -> None:
    decay = DECAY if step > 2 else 0.0
    for mean, weight in zip(parts["model"].average.parameters(), parts["model"].blocks.parameters(), strict=True):
        mean.lerp_(weight, 1 - decay)


def reads(parts: Mapping[str, Any], step: int) -> None:
    next(parts["model"].parameters()).norm().item()


def fails(parts: Mapping[str, Any], step: int) -> None:
    raise KeyError("other")


def of_one(parts: Mapping[str, Any]) -> None:
    pass


def words(function: str, *more: str) -> list[str]:
    return [
        f"model._target_={__name__}.Net", f"model.block_classes=[{__name__}.Block]", f"data._target_={__name__}.Rows",
        f"task.loss={__name__}.squares", f"task.after_step={__name__}.{function}", "training.global_batch_size=16",
        "training.epochs=2", "data.num_train=64", "data.num_val=64", "export=true", *" ".join(more).split(),
    ]  # fmt: skip


def by_hand() -> tuple[list[float], float, dict[str, Tensor]]:
    torch.manual_seed(0)
    model, rows, losses, steps = Net(), Rows("train"), [], 0
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(2):
        model.train()
        for part in torch.randperm(64, generator=torch.Generator().manual_seed(epoch)).split(16):
            loss = squares(model, default_collate([rows[i] for i in part.tolist()]))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            steps += 1
            with torch.no_grad():
                average({"model": model}, steps)
    model.eval()
    return losses, squares(model, default_collate([*Rows("val")])).item(), dict(model.state_dict())


SHARDINGS = (
    *("sharding=ddp", "sharding=per_block", "sharding=per_block sharding.api=fsdp1", "sharding=root offload=cpu"),
    *(
        "sharding=per_layer reshard_after_forward=never",
        "sharding=per_block sharding.api=fsdp1 reshard_after_forward=never",
    ),
)


def test_moving_averages_are_those_of_a_plain_loop() -> None:
    """In training, in validation, which is by the averages, and in the exported model."""
    cases = [words("average", sharding) for sharding in SHARDINGS]
    losses, val_loss, weights = by_hand()
    for sharding, (got, reported, files) in zip(
        SHARDINGS, run_ranks(2, train_leaving, "model.pt", cases)[0], strict=True
    ):
        assert got == pytest.approx(losses, rel=1e-5), sharding
        assert reported[-1]["val/loss"] == pytest.approx(val_loss, rel=1e-5), sharding
        exported = torch.load(io.BytesIO(files["model.pt"]), weights_only=True)["state_dict"]
        torch.testing.assert_close(exported, weights, rtol=1e-5, atol=1e-6)


def test_averages_resume_where_they_were() -> None:
    typed = words("average", "sharding=per_block", "checkpoint.mode=sync")
    with tempfile.TemporaryDirectory() as folder:
        jobs = [
            Job(str(Path(folder, name)), [*typed, *more], trial=())
            for name, more in (("whole", []), ("cut", ["training.max_steps=5"]), ("cut", []))
        ]
        whole, _, resumed = run_ranks(2, train_in, jobs)[0]
    assert resumed.epochs[-1]["val/loss"] == pytest.approx(whole.epochs[-1]["val/loss"], rel=1e-6)
    assert len(resumed.losses) == 3


REFUSED = {
    "reads sharding=per_block": r"task\.after_step=.*reads reads a number of a sharded tensor \(tests/.*\.py:\d+\)",
    "fails sharding=ddp": r"task\.after_step=.*fails fails: KeyError: 'other' \(tests/.*\.py:\d+\)",
}


def test_what_a_function_does_wrong_is_refused() -> None:
    cases = [words(*case.split()) for case in REFUSED]
    for (case, expected), found in zip(REFUSED.items(), run_ranks(2, outcomes, cases)[0], strict=True):
        assert isinstance(found, str) and re.search(expected, found), (case, found)
    with pytest.raises(ConfigError, match="but is called as of_one\\(parts, step\\); give it these two parameters"):
        check_trial(config(*words("of_one")), 2)
