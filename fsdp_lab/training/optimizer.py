"""Optimizer, loss scaler and learning-rate schedule, all made after sharding."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from fsdp_lab.config.errors import UserError
from fsdp_lab.config.target import import_callable, in_words
from fsdp_lab.config.training import (
    LrScheduleConfig,
    LrScheduleName,
    OptimizerImplementation,
    OptimizerName,
)
from fsdp_lab.training.groups import Groups, choose_groups, grouped
from fsdp_lab.training.layout import has_complex
from fsdp_lab.training.own_optimizer import build_own, learning_rate, lr_scale, users_optimizers
from fsdp_lab.training.parallel.base import Parallel
from fsdp_lab.workloads.base import original_name, unwrapped


def build_optimizers(parallel: Parallel, groups: Groups | None = None) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers of the parameters that ranks train: one; with `task.step` the user's, or one for each part.

    Args:
        groups: see `build_optimizer`.

    Raises:
        UserError: see `build_optimizer` and `users_optimizers`.
    """
    task, model = parallel.config.task, unwrapped(parallel.model)
    if task.step is None:
        return {"model": build_optimizer(parallel, groups)}
    if task.optimizers is not None:
        return users_optimizers(model, parallel)
    groups = groups or choose_groups(model, parallel.config.optimizer, lr_scale(parallel))
    made = {}
    for part in parallel.roots(model):
        own = [([name for name in names if name.partition(".")[0] == part], options) for names, options in groups]
        if own := [(names, options) for names, options in own if names]:
            made[part] = build_optimizer(parallel, own)
    return made


def build_optimizer(parallel: Parallel, groups: Groups | None = None) -> torch.optim.Optimizer:
    """Return an optimizer of parameters that ranks train.

    Args:
        groups: of the model before it was sharded; None: of all parameters, as the config chooses them now.

    Raises:
        UserError: the user's class refuses its arguments or the parameters, or the loss scaler cannot use it.
    """
    model, config = parallel.model, parallel.config
    optimizer, lr = config.optimizer, learning_rate(parallel)
    groups = groups or choose_groups(unwrapped(model), optimizer, lr_scale(parallel))
    named = [(original_name(name), p) for name, p in unwrapped(model).named_parameters()]
    if optimizer.target is not None:
        made = build_own(parallel, optimizer.target, named, groups, lr)
        is_fused = any(group.get("fused") for group in made.param_groups) and not isinstance(made, torch.optim.SGD)
        if is_fused and config.precision.loss_scaling and parallel.asks_all_for:  # its overflow has another shape
            raise UserError(
                f"optimizer._target_={optimizer.target} is fused, with precision.loss_scaling=true and "
                f"{parallel.asks_all_for}: fused optimizers do not work with PyTorch's loss scaler for these; use "
                "optimizer.fused=false, or precision=bf16_mixed."
            )
        return made
    chosen = optimizer.chosen_implementation(config.precision.loss_scaling, has_complex(model))
    kwargs: dict[str, Any] = {
        "lr": lr,
        "weight_decay": optimizer.weight_decay,
        "fused": chosen is OptimizerImplementation.fused,
        "foreach": chosen is OptimizerImplementation.foreach,
    }
    params = grouped(named, groups)
    match optimizer.name:
        case OptimizerName.adam:
            return torch.optim.Adam(params, betas=(optimizer.beta1, optimizer.beta2), **kwargs)
        case OptimizerName.adamw:
            return torch.optim.AdamW(params, betas=(optimizer.beta1, optimizer.beta2), **kwargs)
        case OptimizerName.sgd:
            return torch.optim.SGD(params, momentum=optimizer.momentum, **kwargs)
        case _:
            raise ValueError(f"optimizer.name={optimizer.name} is not known")


def build_lr_schedule(
    optimizer: torch.optim.Optimizer,
    config: LrScheduleConfig,
    steps_per_epoch: int,
    total_steps: int | None,
    max_steps: int | None = None,
) -> LRScheduler:
    """Return the schedule, of ours or of the user's.

    Args:
        total_steps: of all epochs; None: not known, and rates do not matter, as in a forecast.
        max_steps: after which the trial ends. Our schedules ignore it, because a resume may set another.

    Raises:
        UserError: the user's callable fails, or returns no schedule that steps without a metric.
    """
    if config.target is None or total_steps is None:
        return LambdaLR(optimizer, lambda step: lr_factor(config, step, steps_per_epoch, total_steps or 1))
    typed, steps = f"lr_schedule._target_={config.target}", min(total_steps, max_steps or total_steps)
    try:
        made = import_callable(config.target, "lr_schedule._target_")(optimizer, **config.users_arguments(steps))
    except Exception as error:
        raise UserError(f"{typed} fails: {in_words(error)}") from error
    if not isinstance(made, LRScheduler) or isinstance(made, ReduceLROnPlateau):
        raise UserError(
            f"{typed} returns a {type(made).__name__}; it must return a torch.optim.lr_scheduler.LRScheduler whose "
            "step() needs no metric: it is called after every optimizer step."
        )
    return made


def lr_factor(config: LrScheduleConfig, step: int, steps_per_epoch: int, total_steps: int) -> float:
    """Return the factor at an optimizer step: a linear warm-up from 1/warmup_steps to 1, then the named curve."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    match config.name:
        case LrScheduleName.constant | LrScheduleName.custom:
            return 1.0
        case LrScheduleName.step:
            return config.gamma ** (step // (steps_per_epoch * config.step_epochs))
        case LrScheduleName.cosine:
            done = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
            low = config.min_lr_ratio
            return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done))
        case _:
            raise ValueError(f"lr_schedule.name={config.name} is not known")
