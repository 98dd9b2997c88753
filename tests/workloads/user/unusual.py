"""Models with parameters, outputs and methods that FSDP2 does not expect, their data and their loss: plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 8


class Layers(nn.Module):
    """Blocks in a row, two plain ones if none are given, between two layers of the model's own."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(blocks or (Block(), Block()))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = self.through(block, x)
        return self.last(x)

    def through(self, block: Any, x: Tensor) -> Any:
        return block(x)


class Block(nn.Module):
    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = inner or nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Any:
        return x + torch.tanh(self.inner(self.norm(x)))


class Rows:
    """Rows of random numbers."""

    def __init__(self, split: str, dtype: str = "float32") -> None:
        generator = torch.Generator().manual_seed(len(split))
        self.rows = torch.randn(64 if split == "train" else 13, WIDTH, generator=generator).to(getattr(torch, dtype))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Tensor:
        return self.rows[i]


def loss(model: nn.Module, rows: Tensor) -> Tensor:
    """Squared error of the sum of the sines."""
    return F.mse_loss(model(rows), rows.sin().sum(1, keepdim=True))


class HeadNorms(nn.Module):
    """Two heads, each with the same norm, as transformers has of queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.of_head = nn.RMSNorm(WIDTH // 2)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.query(x).unflatten(-1, (-1, WIDTH // 2))
        return self.out(self.of_head(heads).flatten(-2))


def head_norms() -> nn.Module:
    return Layers(Block(HeadNorms()), Block(HeadNorms()))


class Complex(nn.Module):
    """A filter of frequencies, as in a Fourier neural operator."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(0.3 * torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=WIDTH)


def complex_filters() -> nn.Module:
    return Layers(Block(Complex()), Block(Complex()))


def in_float64() -> nn.Module:
    return Layers().double()


def transposed() -> nn.Module:
    model = Layers()
    for block in model.blocks:
        block.inner.weight = nn.Parameter((0.3 * torch.randn(WIDTH, WIDTH)).t())
    return model


class Scaled(nn.Module):
    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(scale, requires_grad=scale.is_floating_point())

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale.sum()


def scalar() -> nn.Module:
    return Layers(Block(Scaled(torch.tensor(1.0))), Block())


def whole_numbers() -> nn.Module:
    """Frozen, as of quantized weights."""
    return Layers(Block(Scaled(torch.ones(3, dtype=torch.uint8))), Block(Scaled(torch.ones(1, dtype=torch.bool))))


def two_dtypes() -> nn.Module:
    return Layers(Block(), Block(nn.Linear(WIDTH, WIDTH)), Block(Scaled(torch.ones(3, dtype=torch.bfloat16))))


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).bfloat16().requires_grad_(False)
        self.adapter = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x.bfloat16()).float() + self.adapter(x)


def frozen_bfloat16() -> nn.Module:
    return Layers(Block(Adapted()), Block(Adapted()))


def some_share_a_module() -> nn.Module:
    shared = nn.Linear(WIDTH, WIDTH)
    return Layers(Block(shared), Block(), Block(shared), Block())


class Result:
    """An object of a class of its own."""

    def __init__(self, values: Tensor) -> None:
        self.values = values


class Returns(nn.Module):
    """A block that returns its values inside of something."""

    def __init__(self, wrap: Callable[[Tensor], Any], unwrap: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.wrap, self.unwrap = wrap, unwrap

    def forward(self, x: Any) -> Any:
        x = x if isinstance(x, Tensor) else self.unwrap(x)
        return self.wrap(x + torch.tanh(self.inner(x)))


RETURNED: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "nested": (lambda x: {"a": [Result(Result(x))]}, lambda x: x["a"][0].values.values),
    "function": (lambda x: lambda: x, lambda x: x()),
    "in_place": (lambda x: x.view(-1, WIDTH), lambda x: x.mul_(0.5)),
}


class Unwraps(Layers):
    def through(self, block: Any, x: Tensor) -> Any:
        return block.unwrap(block(x))


def returns(what: str) -> nn.Module:
    return Unwraps(*(Returns(*RETURNED[what]) for _ in range(2)))


class Keeps(nn.Module):
    """A block that keeps a penalty, which the model adds."""

    def __init__(self, of_weight: bool) -> None:
        super().__init__()
        self.inner, self.of_weight = nn.Linear(WIDTH, WIDTH), of_weight
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.inner(x))
        self.kept = self.inner.weight.t() if self.of_weight else self.inner(x).pow(2).mean(1, keepdim=True)
        return x


class AddsKept(Layers):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y + sum(block.kept if block.kept.shape == y.shape else block.kept.pow(2).mean() for block in self.blocks)


def keeps(of_weight: bool) -> nn.Module:
    return AddsKept(Keeps(of_weight), Keeps(of_weight))


class Encodes(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x)

    def encode(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(self.norm(x)))


class CallsMethods(Layers):
    def through(self, block: Any, x: Tensor) -> Any:
        return block.encode(x) + block(x)


def methods() -> nn.Module:
    return CallsMethods(Encodes(), Encodes())


class UsesWeight(Layers):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y + F.linear(x, self.blocks[1].inner.weight).mean(1, keepdim=True)


class Seeded(nn.Linear):
    """It keeps a generator."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.generator = torch.Generator().manual_seed(0)


def generators() -> nn.Module:
    return Layers(*(Block(Seeded()) for _ in range(2)))


def normed_weights() -> nn.Module:
    return Layers(*(Block(nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))) for _ in range(2)))


class ReturnsWeight(Layers):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.first.weight


def loss_of_weight(model: nn.Module, rows: Tensor) -> Tensor:
    y, weight = model(rows)
    return F.mse_loss(y, F.linear(rows, weight).sum(1, keepdim=True))


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.linspace(0.5, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * self.scale)


def float32_buffer() -> nn.Module:
    return Layers(Block(Buffered()), Block(Buffered()))


class Collects(nn.Module):
    """A block that appends to a list that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, found: list[Tensor]) -> Tensor:
        x = x + torch.tanh(self.inner(x))
        found.append(x.pow(2).mean(1, keepdim=True))
        return x


class Collecting(Layers):
    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        found = [x.mean(1, keepdim=True)]
        for block in self.blocks:
            x = block(x, found)
        return self.last(x) + sum(found) * len(found)


def collects() -> nn.Module:
    return Collecting(Collects(), Collects())


class SparseGradient(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, WIDTH, sparse=True)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x + self.table((x[:, 0] > 0).long()))
