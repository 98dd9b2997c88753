"""The training loop of a script: optimizer, schedule, loss scaler, epochs and steps."""

from __future__ import annotations

from fsdp_lab.config.parallel import Dtype, OffloadTarget
from fsdp_lab.config.training import LrScheduleName, OptimizerImplementation, OptimizerName
from fsdp_lab.takehome.imports import Imports, indented
from fsdp_lab.takehome.setup import Setup
from fsdp_lab.takehome.workload import loader_line, loss_lines, num_labels_lines


def optimizer_lines(setup: Setup, imports: Imports) -> list[str]:
    """Return the lines that make the optimizer, its schedule and the loss scaler. They belong after sharding."""
    config, optimizer = setup.config, setup.config.optimizer
    kind = {OptimizerName.adam: "Adam", OptimizerName.adamw: "AdamW", OptimizerName.sgd: "SGD"}[optimizer.name]
    own = f"betas=({optimizer.beta1}, {optimizer.beta2})" if kind != "SGD" else f"momentum={optimizer.momentum}"
    kernels = {
        OptimizerImplementation.fused: "fused=True",
        OptimizerImplementation.foreach: "foreach=True",
        OptimizerImplementation.for_loop: "foreach=False",
    }[optimizer.chosen_implementation(config.precision.loss_scaling)]
    lines = [
        f"optimizer = torch.optim.{kind}(model.parameters(), lr={setup.lr}, {own}, "
        f"weight_decay={optimizer.weight_decay}, {kernels})",
        *_schedule(setup, imports),
    ]
    if config.precision.loss_scaling:
        precision = config.precision
        sizes = f"init_scale={precision.init_scale}, growth_interval={precision.growth_interval}"
        on_host = config.offload.target is not OffloadTarget.none
        place = '"cpu"' if on_host else "device.type"
        lines.append(f"scaler = torch.amp.GradScaler({place}, {sizes})")
        if on_host:
            lines.append("scaler.scale(torch.zeros(()))  # the scale is kept where the gradients are: on the host")
    return lines


def _schedule(setup: Setup, imports: Imports) -> list[str]:
    schedule, training = setup.config.lr_schedule, setup.config.training
    factor = ""
    per_epoch = setup.num_train // training.global_batch_size
    warmup = schedule.warmup_steps
    if schedule.name is LrScheduleName.cosine:
        imports.module("math")
        low, left = schedule.min_lr_ratio, max(1, per_epoch * training.epochs - warmup)
        done = f"min(1.0, (step - {warmup}) / {left})"
        factor = f"{f'{low} + {1 - low} * ' if low else ''}0.5 * (1 + math.cos(math.pi * {done}))"
    elif schedule.name is LrScheduleName.step:
        factor = f"{schedule.gamma} ** (step // {per_epoch * schedule.step_epochs})"
    if not factor and not warmup:
        return []
    warm = f"(step + 1) / {warmup} if step < {warmup} else " if warmup else ""
    return [f"schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: {warm}{factor or '1.0'})"]


def epoch_lines(setup: Setup, imports: Imports) -> list[str]:
    """Return the lines that train through the epochs and print the loss of each."""
    training = setup.config.training
    accum, size = training.grad_accum_steps, training.global_batch_size
    per_epoch = setup.num_train // size
    epochs = -(-setup.num_steps // per_epoch)
    cut = f"[:{setup.num_steps * accum} - epoch * {per_epoch * accum}]" if setup.num_steps < per_epoch * epochs else ""
    seeded = f"torch.Generator().manual_seed({training.seed * 1_000_003} + epoch)"
    served = f"zip(*[iter(loader)] * {accum})" if accum > 1 else "loader"
    stacked = f"torch.stack(losses).view(-1, {accum}).sum(1)" if accum > 1 else "torch.stack(losses)"
    return [
        f"for epoch in range({epochs}):",
        f"    order = torch.randperm({setup.num_train}, generator={seeded})[:{per_epoch * size}]",
        f"    mine = order.view({per_epoch}, {accum}, world_size, -1)[:, :, rank].flatten(0, 1){cut}",
        f"    {loader_line(setup, imports)}",
        "    losses = []",
        f"    for step, {'microbatches' if accum > 1 else 'batch'} in enumerate({served}, epoch * {per_epoch}):",
        f"        {_seed(setup, '{step}')}  # what dropout draws",
        *indented(_step(setup, imports), 2),
        f"    losses = {stacked} / world_size",
        "    dist.all_reduce(losses)",
        "    if rank == 0:",
        '        print(f"epoch {epoch + 1}: train/loss {losses.mean().item():.8f}", flush=True)',
    ]


def _seed(setup: Setup, step: str) -> str:
    return f'torch.manual_seed(zlib.crc32(f"{setup.config.training.seed}/{step}/{{rank}}".encode()))'


def _step(setup: Setup, imports: Imports) -> list[str]:
    """Return the lines of one optimizer step."""
    training, scaled = setup.config.training, setup.config.precision.loss_scaling
    lines = [*_microbatch(setup, imports), "losses.append(loss.detach().float())"]
    if training.grad_accum_steps > 1:
        lines = [
            "for i, batch in enumerate(microbatches, 1):",
            *indented(_sync(setup), 1),
            *indented(lines, 1),
        ]
    lines = [*num_labels_lines(setup), *lines]
    if training.max_grad_norm is not None:
        lines += ["scaler.unscale_(optimizer)"] if scaled else []
        lines.append(f"torch.nn.utils.clip_grad_norm_(model.parameters(), {training.max_grad_norm})")
    scheduled = bool(_schedule(setup, imports))
    if not scaled:
        return [*lines, "optimizer.step()", "optimizer.zero_grad()", *(["schedule.step()"] if scheduled else [])]
    lines += ["scale = scaler.get_scale()"] if scheduled else []
    lines += ["scaler.step(optimizer)", "scaler.update()", "optimizer.zero_grad()"]
    if scheduled:
        lines += ["if scaler.get_scale() >= scale:  # else the step was skipped", "    schedule.step()"]
    return lines


def _sync(setup: Setup) -> list[str]:
    """Return the line that says whether the next backward pass reduces gradients."""
    training = setup.config.training
    if setup.is_ddp:
        sync = "require_backward_grad_sync = i == {}"
    elif training.sync_each_microbatch and setup.dp_replicate > 1:
        return [f"model.set_requires_all_reduce(i == {training.grad_accum_steps})  # replicas reduce once a step"]
    else:
        sync = "set_requires_gradient_sync(i == {})"
    once = f"model.{sync.format(training.grad_accum_steps)}  # gradients are reduced once a step"
    return [] if training.sync_each_microbatch else [once]


def _microbatch(setup: Setup, imports: Imports) -> list[str]:
    """Return the lines of the forward and backward pass of one microbatch."""
    precision, accum = setup.config.precision, setup.config.training.grad_accum_steps
    move, forward, loss = loss_lines(setup, imports)
    if setup.is_ddp and precision.param_dtype is not Dtype.float32:  # DDP has no policy of its own
        autocast = f"with torch.autocast(device.type, dtype=torch.{precision.param_dtype.value}):"
        forward = [autocast, *indented(forward, 1)]
    lines = [*move, *forward]
    accum = 1 if num_labels_lines(setup) else accum  # then the loss is a part of the step's already
    if loss != "loss" or accum > 1:
        lines.append(f"loss = {loss}" + (f" / {accum}" if accum > 1 else ""))
    return [*lines, "scaler.scale(loss).backward()" if precision.loss_scaling else "loss.backward()"]
