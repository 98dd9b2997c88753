"""A user's model that waits at the beginning of each epoch until a test lets it go on. A sweep gets a copy."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch.distributed as dist
from torch import Tensor, nn

STEPS = 4  # of an epoch


class Gated(nn.Module):
    """A small network for 64 pixels.

    The file `at/<trial>.<epoch>.<rank>` has the process that waits to begin an epoch; `go/<trial>.<epoch>` lets it.

    Args:
        trial: the number of the trial, whose checkpoints tell how many epochs are over.
    """

    def __init__(self, trial: int) -> None:
        super().__init__()
        self.trial = trial
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        if self.training and type(images) is Tensor and images.device.type == "cpu" and dist.is_initialized():
            self._wait()
        x = images.flatten(1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def _wait(self) -> None:
        steps = [int(path.stem[5:]) for path in Path("out", str(self.trial), "checkpoints").glob("step_*.json")]
        epoch = 1 + max(steps, default=0) // STEPS
        if Path("go", f"{self.trial}.{epoch}").exists():
            return
        Path("at", f"{self.trial}.{epoch}.{dist.get_rank()}").write_text(f"{os.getpid()}\n")
        while not Path("go", f"{self.trial}.{epoch}").exists():
            time.sleep(0.01)
