"""One trial, from a config to an exported model: read it from top to bottom.

What makes the model and its optimizer is in `build.py`, what a step does in `loop.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from fsdp_lab.config.notes import cpu_notes, memory_notes, sharding_notes
from fsdp_lab.config.trial import TrialConfig
from fsdp_lab.training.build import build
from fsdp_lab.training.checkpoint import Checkpoints, Metrics
from fsdp_lab.training.data import TrainOrder, ValOrder, build_loader, load_data, microbatch_size
from fsdp_lab.training.distributed import Ranks, build_parallel_dims, setup_distributed
from fsdp_lab.training.export import export_model
from fsdp_lab.training.loop import evaluate, train_epoch
from fsdp_lab.training.memory import MemoryProfile, start_clean
from fsdp_lab.training.speed import StepTimer, device_peak_flops, speed_metrics
from fsdp_lab.training.weights import init_weights
from fsdp_lab.workloads.build import build_workload


class Reporter(Protocol):
    """Where a trial's results go. Every rank calls each method with the same values."""

    def facts(self, facts: dict[str, Any]) -> None:
        """What is known before the first step: device, data digest, number of parameters, notes."""

    def step(self, step: int) -> None:
        """Optimizer step `step`, counted from 1, begins."""

    def epoch(self, metrics: Metrics, checkpoint: Path | None) -> None:
        """The metrics of a finished epoch, with `epoch` and `step` among them. After a resume the epochs
        before are told again, so that nothing is lost between a checkpoint and its report."""


def train(
    config: TrialConfig,
    folder: Path,
    reporter: Reporter,
    on_step_losses: Callable[[list[float]], None] = lambda losses: None,
) -> None:
    """Train one trial; every rank calls this.

    Args:
        config: what to train.
        folder: the trial's own folder, seen by all ranks: `checkpoints/` and `model.pt` come to be here.
            A run that was stopped goes on from the last checkpoint in it.
        on_step_losses: told the loss of every step of an epoch, over the global batch.

    Raises:
        UserError: something that the user can mend.
        DivergedError: the loss is not finite.
    """
    ranks = setup_distributed()
    config.check(ranks.world_size)
    start_clean(ranks.device)
    dims = build_parallel_dims(config.sharding, ranks)
    workload = build_workload(config.model, config.data)
    spec, task = workload.model, workload.task
    data = load_data(workload.data, ranks)
    train_order = TrainOrder(len(data.train), config.training, dims)
    train_loader = build_loader(data.train, train_order, config.data.loader_workers, ranks.device)
    val_order = ValOrder(len(data.val), microbatch_size(config.training, dims), dims)
    val_loader = build_loader(data.val, val_order, config.data.loader_workers, ranks.device)

    total_steps = train_order.steps_per_epoch * config.training.epochs
    state = build(
        spec,
        config,
        dims,
        ranks.device,
        materialize=lambda model: init_weights(model, spec, config, ranks.device),
        steps_per_epoch=train_order.steps_per_epoch,
        total_steps=total_steps,
    )
    checkpoints = Checkpoints(folder / "checkpoints", config, ranks)
    resumed_from = checkpoints.load(state)

    reporter.facts(_facts(config, ranks, state.model, data.digest, len(data.train), len(data.val), resumed_from))
    for metrics in state.history:
        reporter.epoch(metrics, resumed_from)

    memory = MemoryProfile(config, spec.description, ranks, folder)
    timer = StepTimer(config.training.timing_warmup_steps, ranks)
    flops = workload.train_flops_per_sample() if device_peak_flops(config, ranks) else 0.0
    max_steps = config.training.max_steps or total_steps
    while state.epoch < config.training.epochs and state.step < max_steps:
        train_order.go_to(state.epoch, state.epoch_step)
        metrics, step_losses = train_epoch(
            state, task, train_loader, config, ranks.device, dims, timer, memory, reporter.step
        )
        on_step_losses(step_losses)
        metrics.update(speed_metrics(timer.take(), config, ranks, flops))
        metrics.update(evaluate(state, task, val_loader, config, ranks.device, dims))
        metrics.update(memory.figures())
        metrics.update(epoch=state.epoch + 1, step=state.step)
        if state.epoch_step >= train_order.steps_per_epoch:  # else max_steps cut it short: a resume takes the rest
            state.epoch, state.epoch_step = state.epoch + 1, 0
        last = state.epoch == config.training.epochs or state.step >= max_steps
        if last or state.epoch % config.checkpoint.every_epochs == 0:
            metrics = checkpoints.save(state, metrics)
            if last:
                metrics.update(checkpoints.finish())
        else:
            state.remember(metrics)
        reporter.epoch(metrics, checkpoints.last_whole())

    if config.export:
        export_model(state.model, config, ranks, folder / "model.pt")


def _facts(
    config: TrialConfig,
    ranks: Ranks,
    model: torch.nn.Module,
    data_digest: str,
    num_train: int,
    num_val: int,
    resumed_from: Path | None,
) -> dict[str, Any]:
    on_cpu = ranks.device.type == "cpu"
    return {
        "device": "cpu" if on_cpu else torch.cuda.get_device_name(ranks.device),
        "world_size": ranks.world_size,
        "num_params": sum(p.numel() for p in model.parameters()),
        "torch": str(torch.__version__),
        "data_digest": data_digest,
        "data_num_train": num_train,
        "data_num_val": num_val,
        "resumed_from": str(resumed_from) if resumed_from else None,
        "notes": [*sharding_notes(config), *memory_notes(config), *(cpu_notes(config) if on_cpu else ())],
    }
