"""The steps that an engineer writes by hand for one setting: FSDP2 per block in bf16_mixed, and nothing of ours around
it. The model and its items are the trial's."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader


def step_times(
    model: nn.Module, blocks: list[nn.Module], items: Any, batch: int, workers: int, device: str
) -> list[float]:
    """Train through the items once, with compiled blocks on a GPU; return the seconds of each step, loading included.

    Args:
        model: with its first weights, on the device.
        blocks: of the model.
        items: images with labels, or rows of tokens.
        batch: of one rank.
        workers: processes that load.
        device: `cuda` or `cpu`.
    """
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for block in blocks:
        if device == "cuda":
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    loader = DataLoader(items, batch, num_workers=workers, pin_memory=device == "cuda", drop_last=True)
    marks = [_mark(device)]
    for got in loader:
        _loss(model, got, device).backward()
        optimizer.step()
        optimizer.zero_grad()
        marks.append(_mark(device))
    if device == "cpu":
        return [ended - begun for begun, ended in itertools.pairwise(marks)]
    torch.cuda.synchronize()
    return [begun.elapsed_time(ended) / 1000 for begun, ended in itertools.pairwise(marks)]


def _loss(model: nn.Module, got: Any, device: str) -> Tensor:
    if isinstance(got, Tensor):
        rows = got.to(device, non_blocking=True)
        return F.cross_entropy(model(rows[:, :-1]).float().flatten(0, 1), rows[:, 1:].flatten())
    images, labels = (each.to(device, non_blocking=True) for each in got)
    return F.cross_entropy(model(images).float(), labels)


def _mark(device: str) -> Any:
    if device == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
