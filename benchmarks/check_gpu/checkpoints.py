"""Asynchronous checkpoints: resumed from one, a run goes on as if it had not stopped, and no rank opens a context
on another rank's GPU."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.check_gpu.lines import Bench, Line, Measured
from benchmarks.check_gpu.parity import CPU_FP32, CUDA_FP32
from benchmarks.check_gpu.run import run_trial
from benchmarks.check_gpu.settings import Setting

CONTEXTS = "contexts on other GPUs"


def lines(bench: Bench) -> list[Line]:
    limit = CUDA_FP32 if bench.cuda else CPU_FP32
    expected = f"two epochs, stopped in between: losses within {limit:g} of sync"
    planned = [
        Line("checkpoints", f"async offload={offload}", bench.workers, expected, offload) for offload in ("none", "cpu")
    ]
    if bench.cuda and bench.workers > 1:
        planned.append(Line("checkpoints", CONTEXTS, bench.workers, "none on any rank", "none"))
    return planned


def measure(line: Line, bench: Bench) -> Measured:
    import torch

    torch.backends.cudnn.allow_tf32 = False
    if line.setting == CONTEXTS:
        return measure_contexts(line)
    with tempfile.TemporaryDirectory() as folder:
        shared = Path(shared_name(folder))
        expected, _ = train_in(shared / "sync", "sync", line, epochs=2)
        first, _ = train_in(shared / "async", "async", line, epochs=1)
        second, resumed_from = train_in(shared / "async", "async", line, epochs=2)
    losses = [*first, *second]
    if not resumed_from or len(losses) != len(expected):
        return Measured(False, f"not resumed: {len(losses)} steps for {len(expected)}, from {resumed_from}")
    apart = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    limit = CUDA_FP32 if bench.cuda else CPU_FP32
    return Measured(apart <= limit, f"apart by {apart:.1e}", {"apart": apart, "async": losses, "sync": expected})


def shared_name(name: str) -> str:
    """The first rank's, for all ranks."""
    import torch.distributed as dist

    names = [name]
    dist.broadcast_object_list(names, src=0)
    return names[0]


def train_in(folder: Path, mode: str, line: Line, epochs: int) -> tuple[list[float], str | None]:
    """The losses of the steps that this run took, and the checkpoint that it began from."""
    batch = 8 * line.workers
    sizes: Setting = {"training.global_batch_size": batch, "data.num_train": 4 * batch, "data.num_val": batch}
    setting = {**sizes, "offload": line.case, "checkpoint.mode": mode, "training.epochs": epochs}
    run = run_trial(setting, folder)
    return run.losses, run.known["resumed_from"]


def measure_contexts(line: Line) -> Measured:
    """Save asynchronously, then ask on every rank which GPUs its process has a context on."""
    import torch
    import torch.distributed as dist

    from fsdp_lab.training.torch_private import gpus_with_context

    with tempfile.TemporaryDirectory() as folder:
        train_in(Path(shared_name(folder)), "async", line, epochs=1)
    held = gpus_with_context()
    if held is None:
        return Measured(False, "this PyTorch cannot tell which GPUs a process holds")
    others: list[list[int] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(others, [i for i in held if i != torch.cuda.current_device()])
    devices_by_rank = {rank: devices for rank, devices in enumerate(others) if devices}
    return Measured(not devices_by_rank, f"{devices_by_rank or 'none'}", {"by_rank": others})
