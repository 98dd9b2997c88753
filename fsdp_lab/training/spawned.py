"""A trial on ranks that are processes of this one, on this machine."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

from fsdp_lab.config import TrialConfig
from fsdp_lab.training.checkpoint import Metrics
from fsdp_lab.training.train import train


def train_on_ranks(config: TrialConfig, num_workers: int) -> Metrics:
    """Train a trial, and return the metrics of its last epoch. The processes end with this one.

    Raises:
        Exception: of any rank, with its traceback; or this machine has too few cores or GPUs.
    """
    here = torch.cuda.device_count() or max(2, os.cpu_count() or 1)
    if num_workers > here:
        raise ValueError(f"it takes {num_workers} processes, and this machine has {here} cores or GPUs")
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_train, (config, num_workers, folder), num_workers)
        metrics: Metrics = json.loads(Path(folder, "metrics.json").read_text())
        return metrics


def _train(rank: int, config: TrialConfig, num_workers: int, folder: str) -> None:
    """Train on one rank. Ranks meet at a file: a port that was free may be taken a moment later."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # PyTorch sends it when the parent ends; the parent ignores it
    os.environ["LOCAL_RANK"] = str(rank)
    if cuda := torch.cuda.is_available():
        torch.cuda.set_device(rank)
    store = f"file://{folder}/store"
    backend, limit = config.offload.backend(cuda), timedelta(seconds=config.check.limit_s)
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=num_workers, timeout=limit)
    train(config, Path(folder), _LastEpoch(Path(folder, "metrics.json"), rank))
    dist.destroy_process_group()


class _LastEpoch:
    """Writes the metrics of an epoch over those of the one before."""

    def __init__(self, file: Path, rank: int) -> None:
        self._file, self._rank = file, rank

    def facts(self, facts: dict[str, Any]) -> None: ...
    def phase(self, name: str) -> None: ...
    def step(self, step: int) -> None: ...

    def epoch(self, metrics: Metrics) -> None:
        if self._rank == 0:
            self._file.write_text(json.dumps(metrics))
