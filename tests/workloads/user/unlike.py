"""Users' models and data sets that differ between processes without a word, in plain PyTorch.

Ranks of tests are forks, which share a hash seed: `Word` has a hash of each rank's own, as words have in processes that
start by themselves.
"""

from __future__ import annotations

import os
import zlib

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, WORDS = 8, ("cat", "dog", "eel", "fox", "gnu")
NUM_TRAIN, NUM_VAL = 64, 24


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


class Word(str):
    __slots__ = ()

    def __hash__(self) -> int:
        return zlib.crc32(f"{rank()}/{self}".encode())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x).tanh()


class Net(nn.Module):
    """Two blocks and a head. Subclasses add what differs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).flatten()


class Heads(Net):
    """A head for each word of a set; `plain`: whose hash is Python's."""

    def __init__(self, plain: bool = False) -> None:
        super().__init__()
        words = {str(number) if plain else Word(number) for number in range(20)}
        self.heads = nn.ModuleDict({word: nn.Linear(WIDTH, 1) for word in words})

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sum(head(x).flatten() for head in self.heads.values())


class Order(Net):
    """Two layers of one shape, which the last rank makes in the other order."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("up", "down") if rank() < int(os.environ["WORLD_SIZE"]) - 1 else ("down", "up"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.down(self.up(x).tanh()))


class Frozen(Net):
    """The last rank freezes the head's bias."""

    def __init__(self) -> None:
        super().__init__()
        self.head.bias.requires_grad_(rank() < int(os.environ["WORLD_SIZE"]) - 1)


class Drawn(Net):
    """A buffer from a generator without a seed."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("directions", torch.from_numpy(np.random.default_rng().normal(size=WIDTH)).float())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.directions)


class Activations(Net):
    """Layers without parameters, in the order of a set."""

    def __init__(self) -> None:
        super().__init__()
        layers = {Word("tanh"): nn.Tanh(), Word("relu"): nn.ReLU(), Word("gelu"): nn.GELU(), Word("elu"): nn.ELU()}
        self.last = nn.Sequential(*(layers[name] for name in {*layers}))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.last(x))


class Moving(Net):
    """It subtracts a mean that each rank moves by its own rows, as a codebook by moving averages does.

    Args:
        averaged: by the rows of all ranks.
    """

    def __init__(self, averaged: bool = False) -> None:
        super().__init__()
        self.averaged = averaged
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            mean = x.detach().mean(0)
            if self.averaged and not x.is_meta:
                dist.all_reduce(mean)
                mean /= dist.get_world_size()
            self.mean = 0.5 * self.mean + 0.5 * mean
        return super().forward(x - self.mean)


class Rows:
    """Rows `x` and a target `y`."""

    def __init__(self, split: str) -> None:
        count = NUM_TRAIN if split == "train" else NUM_VAL
        generator = torch.Generator().manual_seed(count)
        self.x = torch.randn(count, WIDTH, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"x": self.x[i], "y": self.x[i].sum().sin()}


class Vocabulary(Rows):
    """Its words have the numbers that a set gives them."""

    def __init__(self, split: str) -> None:
        super().__init__(split)
        number = {word: i for i, word in enumerate({Word(word) for word in WORDS})}
        self.x = torch.eye(WIDTH)[[number[Word(WORDS[i % len(WORDS)])] for i in range(len(self))]]


class Shorter(Rows):
    """The last rank has a row less in one split."""

    def __init__(self, split: str) -> None:
        super().__init__(split)
        if split == "val" and rank() == int(os.environ["WORLD_SIZE"]) - 1:
            self.x = self.x[:-1]


class OwnShare(Rows):
    """Each rank reads every so many rows, as a script that divides the data itself does."""

    def __init__(self, split: str) -> None:
        super().__init__(split)
        self.x = self.x[rank() :: int(os.environ["WORLD_SIZE"])]


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])
