"""From a workload to the state that a step changes: the one path that training and forecasts share.

The order is FSDP2's: shard bottom-up, fill, and only then the optimizer. DDP and FSDP1 wrap a model with weights.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from fsdp_lab.config.axes.compile import compiles_loss
from fsdp_lab.config.target import import_callable
from fsdp_lab.training.blocks import BlockClasses, apply_to_blocks, check_blocks, find_block_classes
from fsdp_lab.training.checkpoint import TrainState
from fsdp_lab.training.float8 import apply_float8
from fsdp_lab.training.groups import choose_groups
from fsdp_lab.training.layout import describe_layout
from fsdp_lab.training.optimizer import build_lr_schedule, build_optimizers
from fsdp_lab.training.own_optimizer import check_settings, lr_scale, unsharded_settings
from fsdp_lab.training.parallel.base import Parallel
from fsdp_lab.training.parallel.units import last_unit, sharding_units
from fsdp_lab.training.weights import store_in
from fsdp_lab.workloads.base import Workload


def build(
    workload: Workload,
    model: nn.Module,
    parallel: Parallel,
    fill: Callable[[nn.Module], None],
    steps_per_epoch: int = 1,
    total_steps: int | None = None,
    find_unused: bool = False,
    to_float8: Callable[[nn.Module, BlockClasses, torch.device], None] = apply_float8,
) -> TrainState:
    """Shard a model, fill it with its first values, and make its optimizer, loss scaler and learning-rate schedule.

    Args:
        workload: its loss is compiled in place, if the config says so.
        model: as the constructor made it, with or without values.
        parallel: how ranks train it.
        fill: gives the parameters of the sharded model their storage and values, in place.
        steps_per_epoch: of the learning-rate schedule.
        total_steps: of the learning-rate schedule; None: not known.
        find_unused: whether some parameters get no gradient.
        to_float8: called with the classes of blocks; replaces linear layers in them by layers that compute in float8.

    Raises:
        UserError: the model lacks blocks that the config needs, or a parameter cannot be sharded, or the optimizer
            groups parameters by what sharding changes.
    """
    config = parallel.config
    parallel.check_made(model)
    if config.precision.is_narrow:
        store_in(config.precision.storage_dtype, model)
    attributes = {name: dict(vars(parameter)) for name, parameter in model.named_parameters()}
    groups = choose_groups(model, config.optimizer, lr_scale(parallel))
    settings = unsharded_settings(model, parallel, groups)
    roots = parallel.roots(model)
    blocks = workload.model.block_classes or tuple(
        dict.fromkeys(kind for root in roots.values() for kind in find_block_classes(root))
    )
    check_blocks(model, blocks, config)
    if config.precision.float8:
        to_float8(model, blocks, parallel.device)
    in_tokens = getattr(workload.task, "compile_loss", None) is not None  # its loss is our cross entropy
    divided = parallel.divide_layers(model, in_tokens)
    whole = {*roots.values()}
    units = [unit for unit in sharding_units(model, blocks, config.sharding) if unit not in whole]
    last = [] if config.task.step else last_unit(model, blocks, config.sharding)
    apply_to_blocks(model, blocks, [*units, *last], config)
    parallel.divide(model, units, last)
    layout = describe_layout(model, units, blocks, find_unused, last, divided)
    num_params = sum(parameter.numel() for parameter in model.parameters())
    fill(model)
    for name, parameter in model.named_parameters():  # sharding has made new ones
        vars(parameter).update(attributes[name])
    parallel.wrap(model, find_unused)
    if compiles_loss(config):
        workload.task.compile_loss()  # type: ignore[attr-defined]  # tasks of tokens have it

    optimizers = build_optimizers(parallel, groups)
    check_settings(optimizers, parallel, settings)
    lr_schedules = [
        build_lr_schedule(each, config.lr_schedule, steps_per_epoch, total_steps, config.training.max_steps)
        for each in optimizers.values()
    ]
    after_step = import_callable(config.task.after_step, "task.after_step") if config.task.after_step else None
    state = TrainState(
        parallel, optimizers, parallel.scaler(), lr_schedules, layout, num_params, bool(settings), after_step
    )
    state.train()
    return state
