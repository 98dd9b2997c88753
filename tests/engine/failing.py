"""Models that fail, or that show in which process they are made."""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.process
import os
import signal
import subprocess
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


class StartsAProcessElsewhere(Blocks):
    def forward(self, images: Tensor) -> Tensor:
        """Start a process in a session of its own, once."""
        if not _started:
            _started.append(multiprocessing.get_context("fork").Process(target=_sleep_elsewhere))
            _started[0].start()
        return super().forward(images)


def _sleep_elsewhere() -> None:
    os.setsid()
    time.sleep(200)


class EndsTheProcess(Blocks):
    def forward(self, images: Tensor) -> Tensor:
        """End the process as if all were well."""
        os._exit(0)


class Crashes(Blocks):
    def forward(self, images: Tensor) -> Tensor:
        """End the process as faulty native code does."""
        os.kill(os.getpid(), signal.SIGSEGV)
        return super().forward(images)


class WritesItsThreads(Blocks):
    def __init__(self, file: str) -> None:
        super().__init__()
        self.file = file

    def forward(self, images: Tensor) -> Tensor:
        """Write what this process computes with."""
        done = subprocess.run(["readlink", "/proc/self/fd/0"], capture_output=True, text=True, check=False)
        found = {"threads": torch.get_num_threads(), "drawn": DRAWN, "input": done.stdout.strip()}
        Path(self.file).write_text(json.dumps(found))
        return super().forward(images)
