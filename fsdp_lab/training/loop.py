"""One optimizer step, one epoch, one validation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fsdp_lab.config.schema import TrialConfig
from fsdp_lab.training.checkpoint import Metrics, TrainState
from fsdp_lab.training.data import expand_channels
from fsdp_lab.training.distributed import Ranks, sum_over_ranks
from fsdp_lab.training.memory import MemoryProfile
from fsdp_lab.training.parallelize import compute_precision, set_gradient_sync
from fsdp_lab.training.speed import StepTimer

Batch = tuple[Tensor, Tensor]


class DivergedError(RuntimeError):
    """The loss of a step, or of a validation, is NaN or infinite."""


def train_step(state: TrainState, microbatches: list[Batch], config: TrialConfig, ranks: Ranks) -> Tensor:
    """One optimizer step over the microbatches of this rank.

    Returns:
        this rank's mean loss over its part of the global batch, detached, on the device: no sync point.
    """
    total = torch.zeros((), device=ranks.device)
    for i, (images, labels) in enumerate(microbatches):
        images, labels = _to_device(images, labels, config, ranks)
        set_gradient_sync(state.model, sync=i == len(microbatches) - 1)
        with compute_precision(config, ranks.device):
            logits = state.model(images)
        loss = F.cross_entropy(logits.float(), labels) / len(microbatches)
        state.scaler.scale(loss).backward()
        total += loss.detach()
    if config.training.max_grad_norm is not None:
        state.scaler.unscale_(state.optimizer)
        nn.utils.clip_grad_norm_(state.model.parameters(), config.training.max_grad_norm)
    scale = state.scaler.get_scale()
    state.scaler.step(state.optimizer)
    state.scaler.update()
    state.optimizer.zero_grad()
    if state.scaler.get_scale() >= scale:  # a smaller scale says that the step was skipped
        state.lr_schedule.step()
    state.step += 1
    state.epoch_step += 1
    return total


def train_epoch(
    state: TrainState,
    loader: DataLoader[Batch],
    config: TrialConfig,
    ranks: Ranks,
    timer: StepTimer,
    memory: MemoryProfile,
    on_step: Callable[[int], None],
) -> tuple[Metrics, list[float]]:
    """Train through one epoch, or up to `training.max_steps`.

    Returns:
        metrics over the global batch, and the loss of every step averaged over all ranks.

    Raises:
        DivergedError: a step's loss is not finite. Told after the epoch, to keep sync points out of it.
        Exception: whatever a step raises, with the step as a note.
    """
    state.model.train()
    scheduled = state.lr_schedule.last_epoch
    steps_before = state.step
    losses = []
    timer.start()
    for microbatches in _by_step(loader, config.training.grad_accum_steps):
        on_step(state.step + 1)
        try:
            if memory.tracks():
                batch = [tensor for pair in microbatches for tensor in pair]
                with memory.track(state.model, state.optimizer, batch):
                    losses.append(train_step(state, microbatches, config, ranks))
                timer.start()  # the tracked step is slow: not one of the timed
            else:
                losses.append(train_step(state, microbatches, config, ranks))
                memory.step_done()
                timer.step_done()
        except Exception as error:
            error.add_note(f"step {state.step + 1}")
            raise
        if config.training.max_steps is not None and state.step >= config.training.max_steps:
            break
    step_losses = (sum_over_ranks(torch.stack(losses)) / ranks.world_size).tolist()
    mean = sum(step_losses) / len(step_losses)
    if not math.isfinite(mean):
        bad = next(i for i, loss in enumerate(step_losses) if not math.isfinite(loss))
        raise DivergedError(f"the loss of step {steps_before + bad + 1} is {step_losses[bad]}")
    metrics = {"train/loss": mean, "train/lr": float(state.lr_schedule.get_last_lr()[0])}
    if config.precision.loss_scaling:
        taken = state.lr_schedule.last_epoch - scheduled
        metrics["train/loss_scale"] = state.scaler.get_scale()
        metrics["train/skipped_steps"] = float(state.step - steps_before - taken)
    return metrics, step_losses


@torch.no_grad()
def evaluate(state: TrainState, loader: DataLoader[Batch], config: TrialConfig, ranks: Ranks) -> Metrics:
    """Loss and accuracy over the whole validation split, each image counted once.

    Raises:
        DivergedError: the loss is not finite.
    """
    state.model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=ranks.device)  # loss, correct, images
    for images, labels in loader:
        images, labels = _to_device(images, labels, config, ranks)
        with compute_precision(config, ranks.device):
            logits = state.model(images).float()
        sums[0] += F.cross_entropy(logits, labels, ignore_index=-1, reduction="sum")
        sums[1] += (logits.argmax(1) == labels).sum()
        sums[2] += (labels >= 0).sum()
    loss, correct, count = sum_over_ranks(sums).tolist()
    if not math.isfinite(loss):
        raise DivergedError(f"the validation loss after step {state.step} is {loss}")
    return {"val/loss": loss / count, "val/accuracy": correct / count}


def _by_step(loader: DataLoader[Batch], grad_accum_steps: int) -> Iterable[list[Batch]]:
    batches = iter(loader)
    while step := list(islice(batches, grad_accum_steps)):
        yield step


def _to_device(images: Tensor, labels: Tensor, config: TrialConfig, ranks: Ranks) -> Batch:
    images = images.to(ranks.device, non_blocking=True)
    return expand_channels(images, config.model), labels.to(ranks.device, non_blocking=True)
