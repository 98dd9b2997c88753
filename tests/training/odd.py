"""A model that has everything that goes wrong in silence elsewhere, and an unsharded run of it in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_lab.workloads.base import Data, DataSpec, ModelSpec, Workload

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
        turned = x * angles.cos() + x.roll(1, -1) * angles.sin()
        return Hidden(x + self.dropout(self.linear(self.norm(turned))), turned)


class Odd(nn.Module):
    """Tied weights, a table that the constructor computes, a block that is called twice, a frozen layer, a parameter
    without a gradient, a dictionary with a dataclass's content as output, initialisation at the end of all."""

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


class NextToken:
    """Cross entropy of what the model makes of tokens, and a penalty on what it holds."""

    unit = "samples"

    def forward(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        return model(batch[:, :-1])

    def loss(self, outputs: dict[str, Tensor], batch: Tensor) -> Tensor:
        logits = outputs["logits"].float()
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()) + 0.01 * outputs["hidden"].pow(2).mean()

    def metrics(self, outputs: dict[str, Tensor], batch: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        count = torch.tensor(float(len(batch)))
        return {"loss": (self.loss(outputs, batch) * count, count)}


def batches(steps: int, size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (size, LENGTH + 1), generator=generator) for _ in range(steps)]


def no_data() -> Data:
    raise NotImplementedError


def workload(dropout: float = 0.0) -> Workload:
    spec = ModelSpec(lambda: Odd(dropout), None, "odd")
    example = DataSpec(lambda: None, no_data, lambda size: torch.zeros(size, LENGTH + 1, dtype=torch.long))
    return Workload(spec, example, NextToken())


def train_plain(steps: int, size: int, lr: float, seed: int) -> tuple[list[float], dict[str, Tensor]]:
    """A plain script: losses and final weights."""
    torch.manual_seed(seed)
    model, task = Odd(), NextToken()
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    losses = []
    for batch in batches(steps, size):
        optimizer.zero_grad()
        loss = task.loss(model(batch[:, :-1]), batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.detach() for name, value in model.state_dict().items()}
