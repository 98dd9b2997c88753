"""From a workload to the state that a step changes: the one path that training and forecasts share.

The order is FSDP2's: shard bottom-up, fill, and only then the optimizer. DDP and FSDP1 wrap what has weights.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from fsdp_lab.config.parallel import Granularity
from fsdp_lab.config.trial import TrialConfig
from fsdp_lab.training.blocks import BlockClasses, check_blocks, find_block_classes
from fsdp_lab.training.checkpoint import TrainState
from fsdp_lab.training.distributed import ParallelDims
from fsdp_lab.training.float8 import apply_float8
from fsdp_lab.training.fsdp1 import apply_fsdp1
from fsdp_lab.training.layout import describe_layout
from fsdp_lab.training.optimizer import build_lr_schedule, build_optimizer, build_scaler, gradient_device
from fsdp_lab.training.own_optimizer import check_settings, unsharded_settings
from fsdp_lab.training.parallelize import apply_ddp, apply_fully_shard, apply_to_blocks, last_unit, sharding_units
from fsdp_lab.training.shardable import check_made
from fsdp_lab.training.tensor_parallel import apply_tensor_parallel, find_plan
from fsdp_lab.training.unit_hooks import check_own_parameters
from fsdp_lab.workloads.base import Workload


def build(
    workload: Workload,
    model: nn.Module,
    config: TrialConfig,
    dims: ParallelDims,
    device: torch.device,
    fill: Callable[[nn.Module], None],
    steps_per_epoch: int = 1,
    total_steps: int = 1,
    find_unused: bool = False,
    to_float8: Callable[[nn.Module, BlockClasses, torch.device], None] = apply_float8,
) -> TrainState:
    """Shard a model, fill it with its first values, and make its optimizer, loss scaler and learning-rate schedule.

    Args:
        workload: its loss is compiled in place, if the config says so.
        model: as the constructor made it, with or without values.
        dims: how the ranks divide the work; needs a mesh.
        fill: gives the parameters of the sharded model their storage and values, in place.
        steps_per_epoch: of the learning-rate schedule.
        total_steps: of the learning-rate schedule.
        find_unused: whether some parameters get no gradient.
        to_float8: replaces the linear layers of blocks, of these classes, by such that compute in float8.

    Raises:
        UserError: the model lacks blocks that the config needs, or has what it cannot shard, or the optimizer groups
            parameters by what sharding changes.
    """
    assert dims.mesh is not None
    check_made(model, config)
    attributes = {name: dict(vars(parameter)) for name, parameter in model.named_parameters()}
    home = gradient_device(config, device)
    settings = unsharded_settings(model, config, dims.dp_degree, home)
    blocks = workload.model.block_classes or find_block_classes(model)
    check_blocks(model, blocks, config)
    if config.precision.float8:
        to_float8(model, blocks, device)
    divided = None
    if dims.tp_mesh is not None:
        in_tokens = getattr(workload.task, "compile_loss", None) is not None  # whose loss is our cross entropy
        divided = apply_tensor_parallel(model, find_plan(model, config), dims.tp_mesh, divided_loss=in_tokens)
    units = sharding_units(model, blocks, config.sharding)
    last = last_unit(model, blocks, config.sharding)
    apply_to_blocks(model, blocks, [*units, *last], config)
    apply_fully_shard(model, units, config, dims.mesh, last)
    layout = describe_layout(model, units, blocks, find_unused, last, divided)
    num_params = sum(parameter.numel() for parameter in model.parameters())
    fill(model)
    for name, parameter in model.named_parameters():  # sharding has made new ones
        vars(parameter).update(attributes[name])
    model = apply_ddp(model, config, device, find_unused)
    model = apply_fsdp1(model, units, config, dims.mesh, device)
    check_own_parameters(model, config)
    if config.compiles_loss:
        workload.task.compile_loss()  # type: ignore[attr-defined]  # tasks of tokens have it

    optimizer = build_optimizer(model, config, dims.dp_degree)
    check_settings(optimizer, model, settings, config)
    scaler = build_scaler(config, home)
    lr_schedule = build_lr_schedule(optimizer, config.lr_schedule, steps_per_epoch, total_steps)
    state = TrainState(model, optimizer, scaler, lr_schedule, layout, dims, num_params, groups_compared=bool(settings))
    state.train()
    return state


def leaves_some_unused(
    workload: Workload, config: TrialConfig, on_meta: nn.Module | None = None
) -> tuple[bool, list[str]]:
    """Return whether DDP must look for parameters without a gradient, as a step on `meta` shows, and notes about that.

    True if such a step cannot be computed, or where `sharding.find_unused_parameters` says so. False for FSDP2.

    Args:
        on_meta: a copy of the model; None: the constructor is called.
    """
    if config.sharding.granularity is not Granularity.ddp:
        return False, []
    if config.sharding.find_unused_parameters:
        return True, []
    try:
        unused = bool(workload.parameters_without_gradient(on_meta))
        why = "some of them get no gradient"
    except Exception as error:  # noqa: BLE001 (whatever a model's forward pass raises where there are no values)
        unused, reason = True, str(error).partition("\n")[0]
        why = f"a step without values fails, so those that it uses are not known ({type(error).__name__}: {reason})"
    note = f"sharding=ddp looks for unused parameters in every step (find_unused_parameters), which costs time: {why}"
    return unused, [note] if unused else []
