"""The rules between the keys of a trial, in the order in which they are applied.

Each function raises ConfigError for a value that is wrong alone, and CombinationError for values that are invalid
together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd

from fsdp_lab.config.errors import CombinationError, ConfigError, UserError
from fsdp_lab.config.key import check_ranges, divisors
from fsdp_lab.config.parallel import (
    Api,
    Dtype,
    Embeddings,
    Granularity,
    OffloadTarget,
    PrecisionConfig,
    ReshardPolicy,
    ShardingConfig,
)
from fsdp_lab.config.parts import check_classes, check_parts, check_rows, check_vocab_size
from fsdp_lab.config.registry import path_of
from fsdp_lab.config.source import ModelSource
from fsdp_lab.config.target import argument, check_arguments, check_loss, check_nested, import_callable, import_object
from fsdp_lab.config.training import (
    ActivationCheckpointing,
    CheckpointConfig,
    CheckpointMode,
    OptimizerConfig,
    OptimizerImplementation,
    OptimizerName,
)
from fsdp_lab.config.trial import TrialConfig
from fsdp_lab.config.workload import TP_WORDS, DataConfig, ModelConfig, TaskConfig, needed_target, source_of


def check_trial(trial: TrialConfig, num_workers: int) -> None:
    """Check every value and combination that determines the training.

    Args:
        num_workers: the number of ranks that `cluster.num_workers` stands for.
    """
    check_ranges(trial)
    _check_model(trial.model)
    _check_data(trial.data)
    _check_task(trial.task)
    if trial.sharding.granularity is Granularity.ddp:
        _check_ddp(trial)
    if trial.sharding.api is Api.fsdp1:
        _check_fsdp1(trial)
    _check_sharding(trial, num_workers)
    _check_tensor_parallel(trial, num_workers)
    _check_batch(trial, num_workers)
    _check_reshard(trial, num_workers)
    _check_optimizer(trial.optimizer)
    _check_precision(trial.precision)
    _check_export(trial.checkpoint)
    _check_fused(trial)
    _check_selective(trial)
    check_parts(trial.model, trial.data, trial.task)


def check_files(trial: TrialConfig) -> None:
    """Check that data and weights are on this machine and fit each other.

    Raises:
        UserError: a file is missing.
        CombinationError: the data do not fit the model.
    """
    check_rows(trial.model, trial.data)
    if (source := source_of(trial.model)) is not None:
        source.check_files(**trial.model.arguments)
    trial.data.check_files()
    check_classes(trial.model, trial.data)
    check_vocab_size(trial.model, trial.data, trial.data.ask("least_vocab_size"))


def _check_model(model: ModelConfig) -> None:
    function = model.function()
    check_arguments(function, needed_target(model.target, "model"), "model", model.arguments)
    check_nested(model.arguments, "model")
    if isinstance(function, ModelSource):
        function.check(**model.arguments)
    for path in model.block_classes or ():
        if not isinstance(import_object(path, "model.block_classes"), type):
            raise ConfigError(f"model.block_classes={path} is not a class; name the class of the repeated block.")


def _check_data(data: DataConfig) -> None:
    if (function := data.function()) is not None:
        check_arguments(function, str(data.target), "data", data.arguments, given=("split",))
        check_nested(data.arguments, "data")
    if data.collate_fn is not None:
        import_callable(data.collate_fn, "data.collate_fn")


def _check_task(task: TaskConfig) -> None:
    path_of("task.name", task.name)
    if (task.name == "custom") != (task.loss is not None):
        raise CombinationError(
            f"task={task.name} with task.loss={task.loss or 'null'}: task=custom takes its loss from task.loss, "
            "the other tasks have their own; give both, or neither.",
        )
    if task.loss_chunks > 1 and task.name != "language":
        raise CombinationError(
            f"task.loss_chunks={task.loss_chunks} with task={task.name}: only task=language computes its loss in "
            "parts; use task.loss_chunks=1.",
        )
    for name in ("loss", "metrics"):
        if path := getattr(task, name):
            check_loss(path, f"task.{name}")


def _check_ddp(trial: TrialConfig) -> None:
    sharding, target = trial.sharding, trial.offload.target
    needs_sharding = {
        f"offload={target.name}": (
            target is not OffloadTarget.none,
            "DDP keeps every parameter on its device, so there is nothing to offload; use offload=none",
        ),
        f"sharding.dp_replicate={sharding.dp_replicate}": (
            sharding.dp_replicate > 1,
            "DDP replicates over all workers already; use sharding.dp_replicate=1",
        ),
        f"sharding.tp={sharding.tp}": (
            sharding.tp > 1,
            "DDP averages the gradients of all workers, and these hold different parts of a layer; use sharding.tp=1",
        ),
        "sharding.separate_reduce_scatter_group=true": (
            sharding.separate_reduce_scatter_group,
            "DDP has no reduce-scatter; use sharding.separate_reduce_scatter_group=false",
        ),
    }
    for name in ("forward_prefetch", "backward_prefetch"):
        needs_sharding[f"sharding.{name}={getattr(sharding, name)}"] = (
            getattr(sharding, name) is not None,
            f"DDP gathers no parameters, so it cannot prefetch them; use sharding.{name}=null",
        )
    _refuse("sharding=ddp", needs_sharding, " or a sharded setting.")


def _check_fsdp1(trial: TrialConfig) -> None:
    sharding, training = trial.sharding, trial.training
    ahead, behind = sharding.forward_prefetch, sharding.backward_prefetch
    offloads, accumulates = trial.offload.target is OffloadTarget.cpu, training.grad_accum_steps > 1
    lacks = {
        "sharding=ddp": (sharding.granularity is Granularity.ddp, "DDP is no FSDP; use a sharded setting"),
        f"sharding.blocks_per_unit={sharding.blocks_per_unit}": (
            sharding.blocks_per_unit > 1,
            "FSDP1 wraps each block on its own; use sharding.blocks_per_unit=1",
        ),
        f"sharding.embeddings={sharding.embeddings.name}": (
            sharding.embeddings is Embeddings.own,
            "FSDP1's units are the blocks and the root here; use sharding.embeddings=root",
        ),
        "sharding.separate_reduce_scatter_group=true": (
            sharding.separate_reduce_scatter_group,
            "FSDP1 has one communicator; use sharding.separate_reduce_scatter_group=false",
        ),
        "sharding.find_unused_parameters=true": (
            sharding.find_unused_parameters,
            "FSDP1 reduces zeros for them in any case; use sharding.find_unused_parameters=false",
        ),
        f"sharding.forward_prefetch={ahead}": (
            ahead is not None and ahead > 1,
            "FSDP1 gathers one unit ahead, or none; use sharding.forward_prefetch=1 or 0",
        ),
        f"sharding.backward_prefetch={behind}": (
            behind is not None and behind > 1,
            "FSDP1 gathers one unit ahead, or none; use sharding.backward_prefetch=1 or 0",
        ),
        "reshard_after_forward=to_size": (
            trial.reshard_after_forward.policy is ReshardPolicy.to_size,
            "FSDP1 frees or keeps what is gathered; use reshard_after_forward=default or never",
        ),
        "offload=cpu_unpinned": (
            trial.offload.target is OffloadTarget.cpu_unpinned,
            "FSDP1 pins what it offloads; use offload=cpu",
        ),
        "training.sync_each_microbatch=true and offload=cpu": (
            offloads and accumulates and training.sync_each_microbatch,
            "FSDP1 would keep the gradients of the last microbatch only; use training.sync_each_microbatch=false",
        ),
        "precision.float8=true": (
            trial.precision.float8,
            "its rows are not those of flat parameters; use precision=bf16",
        ),
        f"model.forward_methods={trial.model.forward_methods}": (
            bool(trial.model.forward_methods),
            "FSDP1 gathers weights for forward only; leave it out",
        ),
    }
    _refuse("sharding.api=fsdp1", lacks, ", or sharding.api=fsdp2.")


def _refuse(setting: str, others: Mapping[str, tuple[bool, str]], instead: str) -> None:
    """Raise CombinationError for the first of the others that is set.

    Args:
        others: what is typed, to whether it is set, and why not with the setting.
        instead: the end of the message.
    """
    for typed, (is_set, why) in others.items():
        if is_set:
            raise CombinationError(f"{setting} with {typed}: {why}{instead}")


def _check_sharding(trial: TrialConfig, num_workers: int) -> None:
    sharding = trial.sharding
    if sharding.api is Api.fsdp2 and not sharding.limit_all_gathers:
        raise CombinationError(
            "sharding.limit_all_gathers=false with sharding.api=fsdp2: FSDP2 always limits them; use "
            "sharding.limit_all_gathers=true, or sharding.api=fsdp1."
        )
    if sharding.blocks_per_unit > 1 and sharding.granularity is not Granularity.per_block:
        raise CombinationError(
            f"sharding.blocks_per_unit={sharding.blocks_per_unit} with sharding={sharding.granularity.name}: only "
            "sharding=per_block makes units of blocks; use sharding.blocks_per_unit=1 or sharding=per_block.",
        )
    if sharding.embeddings is Embeddings.own:
        _check_embeddings(sharding, trial.task)
    if num_workers % sharding.dp_replicate:
        raise CombinationError(
            f"sharding.dp_replicate={sharding.dp_replicate} does not divide "
            f"cluster.num_workers={num_workers}; use one of {divisors(num_workers)}.",
        )
    if sharding.api is Api.fsdp1 and sharding.dp_replicate > 1 and sharding.dp_shard(num_workers) == 1:
        raise CombinationError(
            f"sharding.dp_replicate={sharding.dp_replicate} with sharding.api=fsdp1 and "
            f"cluster.num_workers={num_workers}: with one worker in each shard group, FSDP1 would not average the "
            "gradients of the replicas; use sharding=ddp sharding.api=fsdp2.",
        )
    if sharding.granularity is Granularity.size_based and sharding.min_num_params is None:
        raise ConfigError(
            "sharding.min_num_params=null: sharding=size_based needs the smallest number of parameters of a unit; "
            "set for example sharding.min_num_params=20000."
        )


def _check_embeddings(sharding: ShardingConfig, task: TaskConfig) -> None:
    if sharding.granularity is not Granularity.per_block:
        raise CombinationError(
            f"sharding.embeddings=own with sharding={sharding.granularity.name}: only sharding=per_block puts what is "
            "outside of the blocks into the root's unit; use sharding.embeddings=root or sharding=per_block.",
        )
    if task.loss_chunks > 1:
        raise CombinationError(
            f"sharding.embeddings=own with task.loss_chunks={task.loss_chunks}: the head's unit would reduce its "
            "gradients once a chunk; use sharding.embeddings=root or task.loss_chunks=1.",
        )


def _check_tensor_parallel(trial: TrialConfig, num_workers: int) -> None:
    sharding, tp = trial.sharding, trial.sharding.tp
    if tp == 1:
        return
    refused = {
        "sharding.api=fsdp1": (
            sharding.api is Api.fsdp1,
            "FSDP1 cannot shard what tensor parallelism has divided; use sharding.api=fsdp2",
        ),
        "precision.float8=true": (
            trial.precision.float8,
            "layers that multiply in float8 are not divided here; use precision=bf16_mixed",
        ),
    }
    _refuse(f"sharding.tp={tp}", refused, ", or sharding.tp=1.")
    plan = trial.model.known_tp_plan()
    for name, word in (plan or {}).items():
        if word not in TP_WORDS:
            raise ConfigError(f"model.tp_plan.{name}={word} is not a way to divide; use one of {', '.join(TP_WORDS)}.")
    workers = f"cluster.num_workers={num_workers}" + _divided(sharding, "dp_replicate")
    sizes = {workers: num_workers // sharding.dp_replicate, **(_tp_sizes(trial, plan or {}) if plan != {} else {})}
    for name, size in sizes.items():
        if size % tp:
            shown = name if name == workers else f"{name}={size}"
            raise CombinationError(
                f"sharding.tp={tp} does not divide {shown}; use one of {divisors(gcd(*sizes.values()))}."
            )
    if plan == {}:
        config = trial.model.arguments.get("config")
        model = f"model.config={config}" if isinstance(config, str) else f"model._target_={trial.model.target}"
        raise CombinationError(
            f"sharding.tp={tp}: {model} has no plan for tensor parallelism; give one by "
            "model.tp_plan={<module>: colwise, <module>: rowwise}, or use sharding.tp=1.",
        )


def _tp_sizes(trial: TrialConfig, plan: Mapping[str, str]) -> dict[str, int]:
    """Return the sizes that tensor parallelism divides, as far as keys and configurations show them."""
    sizes = {f"model.{name}": size for name, size in trial.model.tp_sizes().items()}
    if "rowwise_split" in plan.values():  # each rank has all heads
        sizes = {name: size for name, size in sizes.items() if "heads" not in name}
    length = argument(trial.data.function(), trial.data.arguments, "seq_len")
    if "sequence" in plan.values() and isinstance(length, int):
        sizes["data.seq_len"] = length
    return sizes


def _divided(sharding: ShardingConfig, name: str) -> str:
    """Return ` / sharding.tp=2`, to stand after a number of workers; "" for 1."""
    degree = getattr(sharding, name)
    return f" / sharding.{name}={degree}" if degree > 1 else ""


def check_nodes(sharding: ShardingConfig, nodes: Sequence[str]) -> None:
    """Check that each tensor-parallel group is within a node.

    Args:
        nodes: that of each rank.

    Raises:
        UserError: with the first group that is not.
    """
    for first in range(0, len(nodes), sharding.tp):
        group = nodes[first : first + sharding.tp]
        if len(set(group)) > 1:
            raise UserError(
                f"sharding.tp={sharding.tp}: ranks {first} to {first + len(group) - 1} divide each layer among them, "
                f"but are on {len(set(group))} nodes, so every layer would wait for the network. Start a multiple of "
                f"{sharding.tp} workers on each node: choose cluster.num_workers as a multiple of a node's GPUs or "
                "free the nodes of other trials, use cluster.placement=strict_pack if one node holds all workers, or "
                "use a smaller sharding.tp."
            )


def _check_batch(trial: TrialConfig, num_workers: int) -> None:
    training, sharding = trial.training, trial.sharding
    parts = sharding.dp_degree(num_workers) * training.grad_accum_steps
    if training.global_batch_size % parts:
        below = training.global_batch_size // parts * parts
        choices = f"{below} or {below + parts}" if below else f"{parts}"
        raise CombinationError(
            f"training.global_batch_size={training.global_batch_size} is not divisible by "
            f"cluster.num_workers={num_workers}{_divided(sharding, 'tp')} times "
            f"training.grad_accum_steps={training.grad_accum_steps} = {parts}; use for example {choices}.",
        )


def check_epoch(trial: TrialConfig, num_workers: int) -> None:
    """Check that an epoch has a step, which forecasts need not have.

    Raises:
        CombinationError: the global batch is larger than `data.num_train`.
    """
    samples, size = trial.data.num_train, trial.training.global_batch_size
    if samples is not None and samples < size:
        most = samples - samples % (trial.sharding.dp_degree(num_workers) * trial.training.grad_accum_steps)
        raise CombinationError(
            f"training.global_batch_size={size} is more than data.num_train={samples} samples; use "
            f"{f'at most {most}, or ' if most else ''}data.num_train={size} or more."
        )


def _check_reshard(trial: TrialConfig, num_workers: int) -> None:
    reshard, sharding = trial.reshard_after_forward, trial.sharding
    if reshard.policy is not ReshardPolicy.to_size or sharding.granularity is Granularity.ddp:
        return
    dp_shard = sharding.dp_shard(num_workers)
    if reshard.size is None:
        raise ConfigError(
            "reshard_after_forward.size=null: reshard_after_forward=to_size needs the size of the smaller mesh; "
            f"set reshard_after_forward.size to one of {divisors(dp_shard)}."
        )
    if dp_shard % reshard.size:
        raise CombinationError(
            f"reshard_after_forward.size={reshard.size} does not divide the sharding degree {dp_shard} "
            f"(cluster.num_workers={num_workers} / sharding.dp_replicate={sharding.dp_replicate}"
            f"{_divided(sharding, 'tp')}); use one of {divisors(dp_shard)}.",
        )


def _check_optimizer(optimizer: OptimizerConfig) -> None:
    if optimizer.target is None and optimizer.name is OptimizerName.custom:
        raise ConfigError("optimizer=custom: optimizer._target_ is not set; write package.module.name.")
    if optimizer.target is not None:
        if optimizer.name is not OptimizerName.custom:
            raise CombinationError(
                f"optimizer._target_={optimizer.target} with optimizer={optimizer.name.name}: use optimizer=custom."
            )
        function = import_callable(optimizer.target, "optimizer._target_")
        check_arguments(function, optimizer.target, "optimizer", optimizer.users_arguments, given=("params",))
        check_nested(optimizer.arguments, "optimizer")
        return
    if optimizer.name is not OptimizerName.sgd and optimizer.momentum:
        raise CombinationError(
            f"optimizer.momentum={optimizer.momentum} with optimizer={optimizer.name.name}: momentum belongs to "
            "sgd; use optimizer=sgd, or optimizer.beta1 for Adam.",
        )


def _check_precision(precision: PrecisionConfig) -> None:
    if precision.tf32 and precision.param_dtype is not Dtype.float32:
        raise CombinationError(
            f"precision.tf32=true with precision.param_dtype={precision.param_dtype.name}: TF32 multiplies float32 "
            "matrices; use precision=tf32, or precision.tf32=false.",
        )
    if precision.float8 and precision.param_dtype is not Dtype.bfloat16:
        raise CombinationError(
            f"precision.float8=true with precision.param_dtype={precision.param_dtype.name}: float8 products have "
            "bfloat16 results; use precision=float8, or precision.param_dtype=bfloat16.",
        )
    if precision.loss_scaling and precision.param_dtype is Dtype.bfloat16:
        raise CombinationError(
            "precision.loss_scaling=true with precision.param_dtype=bfloat16: bfloat16 has float32's range and "
            "needs no scaling; use precision.loss_scaling=false or precision=fp16.",
        )


def _check_export(checkpoint: CheckpointConfig) -> None:
    is_off = checkpoint.mode is CheckpointMode["off"]
    if checkpoint.export_best and (is_off or not checkpoint.keep_best):
        raise CombinationError(
            f"checkpoint.export_best=true with {'checkpoint.mode=off' if is_off else 'checkpoint.keep_best=false'}: "
            "there is no best checkpoint to export; use checkpoint.mode=sync and checkpoint.keep_best=true, or "
            "checkpoint.export_best=false.",
        )


def _check_fused(trial: TrialConfig) -> None:
    if trial.optimizer.implementation is not OptimizerImplementation.fused:
        return
    if trial.optimizer.name is OptimizerName.sgd and trial.sharding.granularity is not Granularity.ddp:
        raise CombinationError(
            "optimizer.implementation=fused with optimizer=sgd: PyTorch has no fused SGD for sharded parameters; "
            "use optimizer.implementation=auto or foreach.",
        )
    if trial.precision.loss_scaling:
        raise CombinationError(
            "optimizer.implementation=fused with precision.loss_scaling=true: fused optimizers cannot unscale "
            "sharded gradients; use optimizer.implementation=auto or foreach.",
        )


def _check_selective(trial: TrialConfig) -> None:
    # PyTorch counts a block's operators in the forward pass and in its recomputation: a unit inside the block gathers
    # only in the first.
    granularity = trial.sharding.granularity
    inside = granularity in (Granularity.per_layer, Granularity.size_based)
    if inside and trial.activation_checkpointing is ActivationCheckpointing.selective:
        raise CombinationError(
            f"sharding={granularity.name} with activation_checkpointing=selective: it cannot recompute a block "
            "that contains sharding units; use sharding=per_block, root or ddp, or activation_checkpointing=full.",
        )
