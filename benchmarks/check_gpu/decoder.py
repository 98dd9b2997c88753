"""A Llama-shaped model's memory against the forecast: the same step function, for real and under fake tensors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.check_gpu.lines import Bench, Line, Measured
from benchmarks.check_gpu.memory import GOAL, LIMIT, judge
from benchmarks.check_gpu.settings import Setting, trial, words
from fsdp_lab.files import write_json

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from fsdp_lab.config import SweepConfig
    from fsdp_lab.training.distributed import DistributedContext

CASES: tuple[Setting, ...] = (
    {"sharding": "per_block", "precision": "bf16_mixed", "reshard_after_forward": "always"},
    {"sharding": "per_block", "precision": "bf16_mixed", "activation_checkpointing": "full"},
    {"sharding": "root", "precision": "fp32"},
    {"sharding": "per_block", "precision": "fp32", "offload": "cpu", "reshard_after_forward": "never"},
)
_BATCH = {True: 4, False: 2}  # sequences a worker, on CUDA or not


def lines(bench: Bench) -> list[Line]:
    expected = f"peak within {LIMIT:.0%} (goal {GOAL:.0%}) of the forecast" if bench.cuda else "peak as forecast"
    return [Line("decoder", words(case), bench.workers, expected, case) for case in CASES]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Sequence[Tensor], device: torch.device) -> None:
    """One optimizer step on tokens and the tokens that follow them, both on the host."""
    import torch.nn.functional as F

    tokens, following = (tensor.to(device, non_blocking=True) for tensor in batch)
    logits = model(tokens)
    F.cross_entropy(logits.flatten(0, 1).float(), following.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


def build(config: SweepConfig, ranks: DistributedContext, cuda: bool) -> nn.Module:
    """The sharded model, on `meta`."""
    import torch

    from benchmarks.check_gpu.llama import SMALL, TINY, Block, Llama
    from fsdp_lab.training.distributed import build_parallel_dims
    from fsdp_lab.training.parallelize import apply_fully_shard, apply_to_blocks

    with torch.device("meta"):
        model = Llama(SMALL if cuda else TINY)
    mesh = build_parallel_dims(config.sharding, ranks).mesh
    assert mesh is not None
    apply_to_blocks(model, (Block,), config)
    apply_fully_shard(model, (Block,), config, mesh)
    return model


def tokens(cuda: bool) -> list[Tensor]:
    """`(inputs, labels)` on the host."""
    import torch

    from benchmarks.check_gpu.llama import SMALL, TINY

    config = SMALL if cuda else TINY
    return [torch.zeros(_BATCH[cuda], config.seq_len, dtype=torch.int64) for _ in range(2)]


def prepare(lines: Sequence[Line], bench: Bench) -> None:
    peaks = {line.id: forecast(trial(line.case), line.workers, bench.cuda) for line in lines}
    write_json(_file(bench), peaks)


def _file(bench: Bench) -> Path:
    return bench.prepared / f"decoder_x{bench.workers}.json"


def forecast(config: SweepConfig, workers: int, cuda: bool) -> dict[str, Any]:
    """The peak of the second step, as `fsdp_lab.forecast` finds it for the product's own step."""
    import warnings

    from fsdp_lab.forecast.allocator import allocator_peaks
    from fsdp_lab.forecast.capacity import WORKSPACE_BYTES
    from fsdp_lab.forecast.fake import ACCELERATOR, HOST, fake_tensors, fake_world
    from fsdp_lab.forecast.forecast import as_forecast, fresh_tensor
    from fsdp_lab.forecast.kernels import cuda_kernels
    from fsdp_lab.training.memory import record_step
    from fsdp_lab.training.optimizer import build_optimizer
    from fsdp_lab.training.weights import materialize

    device = ACCELERATOR if cuda else HOST
    with fake_world(workers, device) as ranks, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = build(as_forecast(config), ranks, cuda)
        with fake_tensors(), cuda_kernels() if cuda else nullcontext():
            materialize(model, lambda old: fresh_tensor(old, HOST if offloaded(config) else device))
            move_buffers(model, device)
            optimizer = build_optimizer(model, config, workers)
            step(model, optimizer, tokens(cuda), device)
            batch = tokens(cuda)
            with record_step(model, optimizer, batch, device) as recorder:
                step(model, optimizer, batch, device)
            profile = recorder.finish()
    reserved = allocator_peaks(profile, True, [WORKSPACE_BYTES]).reserved if cuda else None
    return {"peak_bytes": profile.peaks["device"]["total"], "reserved_bytes": reserved, "peaks": profile.peaks}


def offloaded(config: SweepConfig) -> bool:
    return config.offload.target.name != "none"


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Offload keeps parameters on the host; buffers are used where the model computes."""
    for name, buffer in list(model.named_buffers()):
        setattr(model, name, buffer.to(device))


def measure(line: Line, bench: Bench) -> Measured:
    import torch

    from fsdp_lab.training.distributed import setup_distributed
    from fsdp_lab.training.memory import allocator_figures, record_step, start_clean
    from fsdp_lab.training.optimizer import build_optimizer

    ranks, config = setup_distributed(), trial(line.case)
    model = build(config, ranks, bench.cuda)
    model.to_empty(device="cpu" if offloaded(config) else ranks.device)
    move_buffers(model, ranks.device)
    model.init_weights()
    optimizer = build_optimizer(model, config, ranks.world_size)
    step(model, optimizer, tokens(bench.cuda), ranks.device)
    batch = tokens(bench.cuda)
    if bench.cuda:
        torch.cuda.synchronize()
        start_clean(ranks.device)
        for _ in range(2):
            step(model, optimizer, batch, ranks.device)
        torch.cuda.synchronize()
        metrics = {f"memory/{name}": value for name, value in allocator_figures(ranks.device).items()}
    else:
        with record_step(model, optimizer, batch, ranks.device) as recorder:
            step(model, optimizer, batch, ranks.device)
        metrics = {"memory/peak_bytes": recorder.finish().peaks["device"]["total"]}
    measured = judge(metrics, json.loads(_file(bench).read_text())[line.id], bench.cuda)
    num_params = sum(parameter.numel() for parameter in model.parameters())
    return Measured(measured.passed, measured.text, {**metrics, **measured.figures, "num_params": num_params})
