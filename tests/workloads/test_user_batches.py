"""A batch of any class that holds tensors: it arrives as it was, is moved, digested, forecast and learned from."""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from fsdp_lab.forecast.forecast import forecast_profile
from fsdp_lab.workloads.base import describe, tensors_of, to_device
from fsdp_lab.workloads.user.data import Collated, digest_of
from tests.ranks import config, run_ranks, train_all
from tests.training import kept
from tests.training.reference import apart, batches, build_optimizer


class Encoding(collections.UserDict):  # type: ignore[type-arg]
    """As `BatchEncoding` of transformers: a UserDict whose keys are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        if name == "data":
            raise AttributeError(name)
        return self.data[name]


class Pair(NamedTuple):
    x: Tensor
    rest: Any


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor
    rest: list[Tensor]
    name: str = "rows"


class Graph:
    """As PyTorch Geometric's: it moves itself, and returns itself."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y, self.moved = x, y, 0

    def to(self, device: torch.device) -> Graph:
        self.x, self.y, self.moved = self.x.to(device), self.y.to(device), self.moved + 1
        return self


KINDS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Tensor, Tensor]]]] = {
    "Encoding": (lambda x, y: Encoding(x=x, y=y), lambda b: (b.x, b["y"])),
    "Pair": (lambda x, y: Pair(x, {"y": [y]}), lambda b: (b.x, b.rest["y"][0])),
    "Frozen": (lambda x, y: Frozen(x, [y]), lambda b: (b.x, b.rest[0])),
    "nested": (lambda x, y: {"all": (Encoding(g=Graph(x, y)),)}, lambda b: (b["all"][0].g.x, b["all"][0].g.y)),
}


def collate(kind: str, items: list[Any]) -> Any:
    return KINDS[kind][0](torch.stack([x for x, _ in items]), torch.stack([y for _, y in items]))


def loss(kind: str, model: Any, batch: Any) -> Tensor:
    x, y = KINDS[kind][1](batch)
    return nn.functional.mse_loss(model(x), y)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        out: Tensor = self.head(x)
        return out


def _named(kind: str, function: Any) -> Any:
    return lambda *args: function(kind, *args)


for _kind in KINDS:  # what the words name
    globals()[f"collate_{_kind}"], globals()[f"loss_{_kind}"] = _named(_kind, collate), _named(_kind, loss)
HERE = __name__
WORDS = {
    kind: [
        f"model._target_={HERE}.Net", f"data._target_={kept.__name__}.Rows", f"data.collate_fn={HERE}.collate_{kind}",
        f"task.loss={HERE}.loss_{kind}", "data.num_train=null", "data.num_val=null", "optimizer.lr=0.01",
    ]
    for kind in KINDS
}  # fmt: skip


@pytest.fixture(scope="module")
def trained() -> dict[str, list[float]]:
    """The losses of each kind on two ranks."""
    losses = [losses for losses, _ in run_ranks(2, train_all, [*WORDS.values()])[0]]
    return dict(zip(KINDS, losses, strict=True))


def test_it_is_learned_from_as_plain_pytorch_does(trained: dict[str, list[float]]) -> None:
    trial, rows = config(*WORDS["Pair"]), kept.Rows("train")
    torch.manual_seed(0)
    model, expected = Net(), list[float]()
    optimizer = build_optimizer(model, trial)
    for indices in batches(trial, 64):
        optimizer.zero_grad()
        of_step = nn.functional.mse_loss(model(rows.x[indices]), rows.x[indices].sum(1, keepdim=True))
        of_step.backward()
        optimizer.step()
        expected.append(of_step.item())
    assert [kind for kind in KINDS if apart(trained[kind], expected) > 1e-5] == []


def test_it_is_forecast_as_a_tuple_is() -> None:
    plain = [word for word in WORDS["Pair"] if "collate" not in word and "task.loss" not in word]
    cases = [[*plain, f"task.loss={kept.__name__}.loss"], *WORDS.values()]
    tuples, *others = [forecast_profile(config(*words), 2, cuda=False).peaks for words in cases]
    assert others == [tuples] * len(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_copied_in_its_class_and_its_values_count_in_the_digest(kind: str) -> None:
    make, read = KINDS[kind]
    x, y = torch.ones(2, 4), torch.zeros(2, 1)
    batch = make(x, y)
    assert [id(t) for t in tensors_of(batch)] == [id(x), id(y)]
    moved = to_device(batch, torch.device("meta"))
    assert type(moved) is type(batch) and [t.device.type for t in read(moved)] == ["meta", "meta"]
    assert [t.device.type for t in read(batch)] == ["cpu", "cpu"], "the batch itself stays, whatever its `to` does"
    assert "2x4 float32" in describe(batch)
    other = make(x, y + 1)
    one, same, changed = (
        digest_of([Collated([each], lambda items: items[0], None)]) for each in (batch, make(x, y), other)
    )
    assert one == same != changed
