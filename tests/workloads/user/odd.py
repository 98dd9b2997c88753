"""Users' models that have what goes wrong in silence elsewhere, their data and their loss: plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, LENGTH = 11, 8, 6


@dataclass
class Hidden:
    """What a block returns."""

    values: Tensor
    extra: Tensor


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, angles: Tensor) -> Hidden:
        turned = (x * angles.cos() + x.roll(1, -1) * angles.sin()).to(x.dtype)
        return Hidden(x + self.dropout(self.linear(self.norm(turned))), turned)


class Odd(nn.Module):
    """Tied weights, a table that the constructor computes, a block that is called twice, a frozen layer. A parameter
    has no gradient, the output is a dictionary with a dataclass's content, and initialisation comes last."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(3))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = nn.Linear(WIDTH, 3)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        frequencies = 1.0 / 10 ** torch.linspace(0, 1, WIDTH)
        self.register_buffer("angles", torch.outer(torch.arange(float(LENGTH)), frequencies), persistent=False)
        for name, parameter in self.named_parameters():
            if name.endswith("linear.weight"):
                nn.init.normal_(parameter, std=0.3)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x = self.embedding(tokens)
        for block in (*self.blocks, self.blocks[1]):
            hidden = block(x, self.angles)
            x = hidden.values + 0.1 * hidden.extra
        return {"logits": self.head(self.frozen(x)), "hidden": x}


class Counting(nn.Module):
    """A block that changes its buffers: in place, by a new tensor, and in the kernel of a normalisation.

    It has a parameter of its own, which makes it a unit with sharding=per_layer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.norm = nn.BatchNorm1d(LENGTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.calls = 0
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.seen += 1
            self.mean = 0.5 * self.mean + x.detach().mean((0, 1))
        return x + torch.tanh(self.gain * self.norm(self.linear(x)) - self.mean) / (1 + self.calls % 2)


class Stateful(nn.Module):
    """On one rank: BatchNorm computes over a rank's samples."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Counting() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x), x


class Rows:
    """Rows of random tokens."""

    def __init__(self, split: str) -> None:
        generator = torch.Generator().manual_seed(len(split))
        self.rows = torch.randint(VOCABULARY, (64 if split == "train" else 13, LENGTH + 1), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Tensor:
        return self.rows[i]


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Cross entropy of the next tokens, and a penalty on what the model holds."""
    outputs = model(batch[:, :-1])
    logits, hidden = outputs.values() if isinstance(outputs, dict) else outputs
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten()) + 0.01 * hidden.pow(2).mean()


@dataclass
class Output:
    logits: Tensor


class Summariser(nn.Module):
    """Tells each token of a summary from the one before it and the mean of the source's tokens.

    `as_dict`: it returns a dictionary, else a dataclass."""

    def __init__(self, vocab_size: int = 384, width: int = 16, num_layers: int = 2, as_dict: bool = False) -> None:
        super().__init__()
        self.shared = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.head.weight = self.shared.weight
        self.as_dict = as_dict

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Output | dict[str, Tensor]:
        counts = attention_mask[..., None] / attention_mask.sum(1)[:, None, None]
        before = F.pad(labels.clamp(min=0), (1, 0))[:, :-1]
        x = self.shared(before) + (self.shared(input_ids) * counts).sum(1, keepdim=True)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        logits = self.head(x)
        return {"logits": logits} if self.as_dict else Output(logits)


class Ragged:
    """Rows of random tokens, whose sources and targets have other lengths; some have no label at all."""

    vocab_size = 20

    def __init__(self, split: str) -> None:
        generator = torch.Generator().manual_seed(len(split))
        self.rows = []
        for i in range(48 if split == "train" else 13):
            source, target = (int(torch.randint(1, most, (), generator=generator)) for most in (9, 7))
            ids = torch.randint(1, self.vocab_size, (8,), generator=generator)
            labels = torch.randint(self.vocab_size, (6,), generator=generator)
            mask = (torch.arange(8) < source).long()
            labels[0 if i % 8 == 0 else target :] = -100
            self.rows.append({"input_ids": ids * mask, "attention_mask": mask, "labels": labels})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return self.rows[i]
