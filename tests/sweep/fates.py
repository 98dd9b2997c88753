"""A user's model whose way through training is a setting. A sweep imports it from its own folder, a copy of this."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_lab.config import UserError

STEPS = 4  # of an epoch
PASS = 6  # in which most fates happen: in the second epoch
HUGE = 1e6


class Fate(nn.Module):
    """A small network for 64 pixels that ends as its fate is.

    Args:
        fate: the name of a function below, which gets the model and the rank at each pass; what it gives is a factor.
        mark: in the environment of the sweep's processes; for `waits`, the number of the trial.
    """

    def __init__(self, fate: str, mark: str | int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.head = nn.Linear(64, 10)
        self.fate, self.mark, self.passes = globals()[fate], str(mark), 0

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        x = images.flatten(1)
        for block in self.blocks:
            x = block(x)
        x = self.head(x)
        if not _in_training(images):
            return x
        self.passes += self.training
        factor = self.fate(self, dist.get_rank())
        return x if factor is None else x * factor


def _in_training(images: Tensor) -> bool:
    """Whether this is not the look at a model before it trains, with tensors that hold nothing."""
    return type(images) is Tensor and images.device.type == "cpu" and dist.is_initialized()


def waits(model: Fate, rank: int) -> None:
    """It begins each epoch only when a test lets it go on: when the file `go/<trial>.<epoch>` is there.

    The file `at/<trial>.<epoch>.<rank>` has the process that waits. Checkpoints tell how many epochs are over.
    """
    steps = [int(path.stem[5:]) for path in Path("out", model.mark, "checkpoints").glob("step_*.json")]
    name = f"{model.mark}.{1 + max(steps, default=0) // STEPS}"
    if model.training and not Path("go", name).exists():
        Path("at", f"{name}.{rank}").write_text(f"{os.getpid()}\n")
        while not Path("go", name).exists():
            time.sleep(0.01)


def finishes(model: Fate, rank: int) -> None:
    """Each rank writes once the hash of a word, and rank 0 who listens where. A buffer has each rank's own value."""
    model.register_buffer("own", torch.full((), float(rank)), persistent=False)
    if model.training and model.passes == PASS:
        Path(f"hash{rank}").write_text(str(hash("word")))
    if rank == 0 and model.training and model.passes == PASS:
        name = " ".join(psutil.Process().cmdline())  # as ps shows this process
        Path("seen.json").write_text(json.dumps({"listeners": _listeners(model.mark), "name": name}))


def hangs(model: Fate, rank: int) -> None:
    """Rank 1 waits for nothing, and rank 0 for rank 1."""
    if rank == 1 and model.passes == PASS:
        threading.Event().wait()


def raises(model: Fate, rank: int) -> None:
    """Rank 0 fails in each attempt, and rank 1 waits for it."""
    if rank == 0:
        raise RuntimeError("the first step fails")


def refused(model: Fate, rank: int) -> None:
    """It raises an error of which fsdp_lab says that the user has to correct it."""
    raise UserError("model.fate=refused is refused")


def killed(model: Fate, rank: int) -> None:
    """Rank 1 is killed once. What it has started runs on, and in a session of its own."""
    if rank == 1 and model.passes == PASS and not Path("killed").exists():
        Path("killed").touch()
        subprocess.Popen(["sleep", "600"])
        os.kill(os.getpid(), signal.SIGKILL)


def crashes(model: Fate, rank: int) -> None:
    """Rank 0 ends as faulty native code does, in each attempt."""
    if rank == 0:
        signal.pthread_kill(threading.get_ident(), signal.SIGSEGV)


def exits(model: Fate, rank: int) -> None:
    """Code ends the process as if all were well, in each attempt."""
    os._exit(0)


def runs_out_of_memory(model: Fate, rank: int) -> None:
    """PyTorch's allocator finds no memory on the last rank."""
    if rank == dist.get_world_size() - 1 and model.passes == PASS:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")


def fills_the_host(model: Fate, rank: int) -> None:
    """It takes 4 GiB of the host's memory and keeps them."""
    _taken = [bytearray(os.urandom(2**20) * 64) for _ in range(64)]
    threading.Event().wait()


def diverges(model: Fate, rank: int) -> float:
    """The loss is no number."""
    return math.nan


def falls_behind(model: Fate, rank: int) -> float:
    """The loss is far above all others. After an epoch it waits to be stopped."""
    if model.passes == PASS:
        threading.Event().wait()
    return HUGE


def _listeners(mark: str) -> list[tuple[str, str]]:
    """`(process, address)` of each socket of the sweep that takes connections: its driver's, Ray's and the ranks'."""
    top = psutil.Process()
    while mark in top.environ():  # the command itself is a fork, and has the environment of its parent
        top = top.parent() or top
    family = []
    for process in (top, *top.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):  # it ended while it was looked at
            family.append((process.name(), process.net_connections(kind="inet")))
    return [(name, c.laddr.ip) for name, connections in family for c in connections if c.status == psutil.CONN_LISTEN]
