"""A batch of any class that holds tensors: it arrives as it was, is moved, digested and learned from."""

from __future__ import annotations

import collections
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fsdp_lab.workloads.base import tensors_of, to_device
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


def collate(items: list[tuple[Tensor, Tensor]]) -> Any:
    """A batch in which a class is in another: a dictionary, a tuple, and each of those above."""
    x, y = (torch.stack(parts) for parts in zip(*items, strict=True))
    return {"all": (Encoding(g=Graph(x, y)), Pair(x, {"f": [Frozen(x, [y])]}))}


def parts_of(batch: Any) -> list[Tensor]:
    """Each tensor of a batch, as its user reads it."""
    encoding, pair = batch["all"]
    frozen = pair.rest["f"][0]
    return [encoding.g.x, encoding["g"].y, pair.x, frozen.x, frozen.rest[0]]


def loss(model: Any, batch: Any) -> Tensor:
    x, y, *_ = parts_of(batch)
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


HERE = __name__
WORDS = (f"model._target_={HERE}.Net", f"data._target_={kept.__name__}.Rows", "data.num_train=null",
         "data.num_val=null", "optimizer.lr=0.01")  # fmt: skip
NESTED = (*WORDS, f"data.collate_fn={HERE}.collate", f"task.loss={HERE}.loss")


def test_it_is_learned_from_as_plain_pytorch_does() -> None:
    trial, rows = config(*NESTED), kept.Rows("train")
    torch.manual_seed(0)
    model, expected = Net(), list[float]()
    optimizer = build_optimizer(model, trial)
    for indices in batches(trial, 64):
        optimizer.zero_grad()
        of_step = nn.functional.mse_loss(model(rows.x[indices]), rows.x[indices].sum(1, keepdim=True))
        of_step.backward()
        optimizer.step()
        expected.append(of_step.item())
    assert apart(run_ranks(2, train_all, [[*NESTED]])[0][0][0], expected) <= 1e-5


def test_it_is_copied_in_its_class_and_its_values_count_in_the_digest() -> None:
    items = [(torch.ones(4), torch.zeros(1)) for _ in range(2)]
    batch = collate(items)
    assert {id(tensor) for tensor in tensors_of(batch)} == {id(tensor) for tensor in parts_of(batch)}
    moved = to_device(batch, torch.device("meta"))
    classes = [type(each) for each in (*moved["all"], moved["all"][0]["g"], moved["all"][1].rest["f"][0])]
    assert classes == [Encoding, Pair, Graph, Frozen] and moved["all"][1].rest["f"][0].name == "rows"
    assert {tensor.device.type for tensor in parts_of(moved)} == {"meta"}
    assert {tensor.device.type for tensor in parts_of(batch)} == {"cpu"}, "the batch stays, whatever its `to` does"
    changed = [items[0], (torch.ones(4), torch.ones(1))]
    one, same, other = (digest_of([Collated(each, collate, None)]) for each in (items, [*items], changed))
    assert one == same != other
