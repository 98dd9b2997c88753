"""Optimizer, loss scaler and learning-rate schedule, all made after sharding."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim.lr_scheduler import LambdaLR

from fsdp_lab.config.errors import UserError
from fsdp_lab.config.parallel import Api, OffloadTarget
from fsdp_lab.config.training import (
    LrScheduleConfig,
    LrScheduleName,
    OptimizerImplementation,
    OptimizerName,
)
from fsdp_lab.config.trial import TrialConfig
from fsdp_lab.training.own_optimizer import build_own, learning_rate
from fsdp_lab.training.shardable import has_complex


def build_optimizer(model: nn.Module, config: TrialConfig, dp_degree: int) -> torch.optim.Optimizer:
    """Return the optimizer of the sharded parameters.

    Args:
        dp_degree: the factor of the learning rate with `optimizer.scale_lr`.

    Raises:
        UserError: the user's class refuses its arguments or the parameters.
    """
    optimizer, lr = config.optimizer, learning_rate(config, dp_degree)
    params = [p for p in model.parameters() if p.requires_grad]
    if optimizer.target is not None:
        made = build_own(config, optimizer.target, params, lr)
        _check_fused(made, config)
        return made
    kernels = implementation(config, has_complex(model))
    kwargs: dict[str, Any] = {"lr": lr, "weight_decay": optimizer.weight_decay, **kernels}
    match optimizer.name:
        case OptimizerName.adam:
            return torch.optim.Adam(params, betas=(optimizer.beta1, optimizer.beta2), **kwargs)
        case OptimizerName.adamw:
            return torch.optim.AdamW(params, betas=(optimizer.beta1, optimizer.beta2), **kwargs)
        case OptimizerName.sgd:
            return torch.optim.SGD(params, momentum=optimizer.momentum, **kwargs)
        case _:
            raise ValueError(f"optimizer.name={optimizer.name} is not known")


def _check_fused(made: torch.optim.Optimizer, config: TrialConfig) -> None:
    """Check that the loss scaler can use an own optimizer."""
    is_fused = any(group.get("fused") for group in made.param_groups) and not isinstance(made, torch.optim.SGD)
    if is_fused and config.precision.loss_scaling and _asks_all(config):  # whose overflow has another shape
        setting = "sharding.api=fsdp1" if config.sharding.api is Api.fsdp1 else f"sharding.tp={config.sharding.tp}"
        raise UserError(
            f"optimizer._target_={config.optimizer.target} is fused, with precision.loss_scaling=true and {setting}: "
            "fused optimizers do not work with PyTorch's loss scaler for these; use optimizer.fused=false, or "
            "precision=bf16_mixed."
        )


def implementation(config: TrialConfig, has_complex: bool = False) -> dict[str, bool]:
    """Return the optimizer's arguments that choose its kernels."""
    chosen = config.optimizer.chosen_implementation(config.precision.loss_scaling, has_complex)
    return {
        "fused": chosen is OptimizerImplementation.fused,
        "foreach": chosen is OptimizerImplementation.foreach,
    }


def build_scaler(config: TrialConfig, device: torch.device) -> torch.amp.GradScaler:
    """Return the dynamic loss scaler for float16; a disabled one passes everything through.

    Args:
        device: where the gradients are, and therefore the scale. GradScaler copies its tensors to the gradients' device
            without waiting, and a CPU would read them before they arrive.
    """
    precision = config.precision
    kind = ShardedGradScaler if _asks_all(config) else torch.amp.GradScaler
    scaler = kind(
        device.type,
        init_scale=precision.init_scale,
        growth_interval=precision.growth_interval,
        enabled=precision.loss_scaling,
    )
    scaler.scale(torch.zeros((), device=device))  # the first tensor that is scaled says where the scale is kept
    return scaler


def _asks_all(config: TrialConfig) -> bool:
    """Return whether the loss scaler asks all ranks for overflows.

    A rank sees those of its own part, and FSDP2's scaler asks only ranks that share the first parameter.
    """
    return config.sharding.api is Api.fsdp1 or config.sharding.tp > 1


def gradient_device(config: TrialConfig, device: torch.device) -> torch.device:
    """Return where the optimizer finds parameters and gradients: on the host with offload, else on the device."""
    return device if config.offload.target is OffloadTarget.none else torch.device("cpu")


def build_lr_schedule(
    optimizer: torch.optim.Optimizer, config: LrScheduleConfig, steps_per_epoch: int, total_steps: int
) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: lr_factor(config, step, steps_per_epoch, total_steps))


def lr_factor(config: LrScheduleConfig, step: int, steps_per_epoch: int, total_steps: int) -> float:
    """Return the factor at an optimizer step: a linear warm-up from 1/warmup_steps to 1, then the named curve."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    match config.name:
        case LrScheduleName.constant:
            return 1.0
        case LrScheduleName.step:
            return config.gamma ** (step // (steps_per_epoch * config.step_epochs))
        case LrScheduleName.cosine:
            done = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
            low = config.min_lr_ratio
            return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done))
        case _:
            raise ValueError(f"lr_schedule.name={config.name} is not known")
