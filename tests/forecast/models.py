"""Models of which a forecast has to know more than their parameters. They import nothing of fsdp_lab."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.flop_counter import register_flop_formula

WEIGHT = torch.linspace(0.5, 1.5, 10)


class Rows(torch.utils.data.Dataset[Any]):
    def __init__(self, split: str = "train") -> None:
        self.items = torch.linspace(-1, 1, 16 * 16 * 64).view(64, 16, 16)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.items[index], index % 10


def padded(items: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    rows = nn.utils.rnn.pad_sequence([rows for rows, _ in items], batch_first=True)
    return rows, torch.tensor([label for _, label in items])


class Worst(Rows):
    """No batch has more than 99 rows an item, of which few come."""

    @staticmethod
    def example_batch(size: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(size, 99, 16), torch.zeros(size, dtype=torch.int64)


class Mean(nn.Module):
    """Rows of 16 -> ten classes, from the mean of what `mix` makes of 64 numbers a row."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(16, 64), nn.Linear(64, 10)

    def mix(self, hidden: Tensor) -> Tensor:
        return hidden

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.mix(self.embed(rows)).mean(1))


class Tuned(Mean):
    """Only the head is trained."""

    def __init__(self, frozen: bool = True) -> None:
        super().__init__()
        self.embed.requires_grad_(not frozen)


class Held(Mean):
    """Has a tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.linspace(0, 1, 10)

    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows) * self.scale.to(rows.device)


def weighted(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], weight=WEIGHT.to(batch[0].device))


class Grouped(Mean):
    """Four experts of 64 x 32, each with a quarter of the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(4, 64, 32))
        self.back = nn.Linear(32, 64)

    def mix(self, hidden: Tensor) -> Tensor:
        rows = hidden.flatten(0, 1).bfloat16()
        ends = torch.arange(1, 5, device=rows.device, dtype=torch.int32) * (len(rows) // 4)
        mixed = torch._grouped_mm(rows, self.experts.bfloat16(), offs=ends)
        return self.back(mixed.to(hidden.dtype)).view_as(hidden)


@torch.library.custom_op("fsdp_lab_tests::attend", mutates_args=())
def attend(rows: Tensor) -> Tensor:
    return (rows @ rows.mT).softmax(-1) @ rows


attend.register_fake(torch.empty_like)
attend.register_autograd(lambda context, gradient: gradient.clone())


@torch.library.custom_op("fsdp_lab_tests::own_attention", mutates_args=())
def own_attention(rows: Tensor) -> Tensor:
    """In the layout (batch, rows, heads, size), which is not PyTorch's."""
    return rows.clone()


own_attention.register_fake(torch.empty_like)
own_attention.register_autograd(lambda context, gradient: gradient.clone())
register_flop_formula(torch.ops.fsdp_lab_tests.own_attention)(lambda shape, **_: 1000 * shape[0])


class Priced(Mean):
    def mix(self, hidden: Tensor) -> Tensor:
        return torch.ops.fsdp_lab_tests.own_attention(hidden.unflatten(-1, (4, 16))).flatten(-2)


class Unused(Mean):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(64, 64)


class Own(Mean):
    def mix(self, hidden: Tensor) -> Tensor:
        return torch.ops.fsdp_lab_tests.attend(hidden)


class Fourier(Mean):
    def mix(self, hidden: Tensor) -> Tensor:
        return torch.fft.fft(hidden, dim=1).real


class Mask(Mean):
    def mix(self, hidden: Tensor) -> Tensor:
        return hidden * torch.ones(16, 64)


class Flex(Mean):
    def mix(self, hidden: Tensor) -> Tensor:
        return flex_attention(hidden[:, None], hidden[:, None], hidden[:, None])[:, 0]


class Bag(Mean):
    """Its embeddings have sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(100, 64, sparse=True)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.bag((rows.abs() * 10).long().flatten(1)))
