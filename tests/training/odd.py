"""The odd model of `tests.workloads.user.odd` as a workload, and an unsharded run of it in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_lab.workloads.base import Data, DataSpec, ModelSpec, Workload
from tests.workloads.user.odd import LENGTH, VOCABULARY, Odd


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
