"""`run.minimize` by hand, for a step of the user's on two ranks."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


class Hand:
    """`run.minimize` by hand: the mean over two ranks of gradients, which it draws for as each does."""

    def __init__(self, optimizers: Mapping[str, Any], batches: list[list[Any]], step: int, clip: float | None) -> None:
        self.optimizers, self.batches, self.clip, self.loss = optimizers, batches, clip, 0.0
        self.drawn = []
        for rank in range(2):
            torch.manual_seed(zlib.crc32(f"0/{step}/{rank}".encode()))
            self.drawn.append(torch.get_rng_state())

    def minimize(self, name: str, loss_of: Callable[[Any], Any]) -> Tensor:
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()
        total = 0.0
        for rank, batches in enumerate(self.batches):
            torch.set_rng_state(self.drawn[rank])
            for batch in batches:
                loss = loss_of(batch)
                loss = loss[0] / loss[1] if isinstance(loss, tuple) else loss
                (loss / 2 / len(batches)).backward()
                total += loss.item() / 2 / len(batches)
            self.drawn[rank] = torch.get_rng_state()
        if self.clip:
            nn.utils.clip_grad_norm_([p for g in self.optimizers[name].param_groups for p in g["params"]], self.clip)
        self.optimizers[name].step()
        self.loss += total
        return torch.tensor(total)
