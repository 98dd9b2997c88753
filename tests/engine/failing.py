"""Models that fail, or that show in which process they are made."""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.process
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

_started: list[multiprocessing.process.BaseProcess] = []
DRAWN = np.random.rand()


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        x = images.flatten(1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class FailsOnRank0(Blocks):
    def forward(self, images: Tensor) -> Tensor:
        """Rank 1 waits for rank 0 in the collective that comes next."""
        if dist.get_rank() == 0:
            raise RuntimeError("the first step fails")
        return super().forward(images)


class StartsAProcess(Blocks):
    def forward(self, images: Tensor) -> Tensor:
        """Start a process that runs on, once."""
        if not _started:
            _started.append(multiprocessing.get_context("fork").Process(target=time.sleep, args=(200,)))
            _started[0].start()
        return super().forward(images)


class WritesItsThreads(Blocks):
    def __init__(self, file: str) -> None:
        super().__init__()
        self.file = file

    def forward(self, images: Tensor) -> Tensor:
        """Write what this process computes with."""
        Path(self.file).write_text(json.dumps({"threads": torch.get_num_threads(), "drawn": DRAWN}))
        return super().forward(images)
