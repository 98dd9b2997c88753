"""Rules between the keys of a trial. Pure: no torch, no Ray, so a bad value is told in a moment."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fsdp_lab.config.convert import flatten, to_dict
from fsdp_lab.config.errors import CombinationError, ConfigError, UserError
from fsdp_lab.config.registry import module_of
from fsdp_lab.config.schema import (
    AFTERWARDS,
    RESUME_KEYS,
    ClusterConfig,
    DataConfig,
    Dtype,
    Engine,
    Granularity,
    MemoryProfile,
    OffloadTarget,
    OptimizerImplementation,
    OptimizerName,
    ReshardPolicy,
    SchedulerName,
    TrialConfig,
)
from fsdp_lab.hardware import cpus_per_gpu, default_loader_workers, driver, num_cpus, num_gpus, pytorch_cuda
from fsdp_lab.metrics import can_be_objective, objective_keys

_AT_LEAST_ONE = (
    "model.image_size", "model.num_channels", "model.patch_size", "model.num_layers", "model.num_heads",
    "model.hidden_dim", "model.mlp_dim", "model.num_classes", "data.num_train", "data.num_val",
    "training.epochs", "training.max_steps", "training.global_batch_size", "training.grad_accum_steps",
    "sharding.dp_replicate", "sharding.min_num_params", "reshard_after_forward.size", "checkpoint.every_epochs",
    "checkpoint.keep_last", "cluster.num_workers", "precision.growth_interval", "lr_schedule.step_epochs",
    "search.num_trials", "scheduler.grace_epochs", "nightly.repeats", "nightly.keep",
)  # fmt: skip
_NOT_NEGATIVE = (
    "data.loader_workers", "training.timing_warmup_steps", "training.seed", "optimizer.weight_decay",
    "optimizer.momentum", "lr_schedule.warmup_steps", "lr_schedule.min_lr_ratio", "cluster.max_failures",
    "sharding.forward_prefetch", "sharding.backward_prefetch", "search.seed", "tracking.patience_s",
    "repeat", "report.loss_tolerance", "nightly.jitter_s", "nightly.late_s", "nightly.tolerance.peak_memory",
    "nightly.others_cpu", "nightly.tolerance.samples_per_s", "nightly.tolerance.loss",
    "nightly.tolerance.forecast_error",
)  # fmt: skip
_POSITIVE = (
    "optimizer.lr", "training.max_grad_norm", "precision.init_scale", "cluster.cpus_per_worker",
    "cluster.wait_timeout_s", "lr_schedule.gamma", "forecast.capacity_gib", "trial_timeout_s",
    "nightly.significance", "nightly.notify.timeout_s",
)  # fmt: skip
LARGEST_INTEGER = 2**53  # what JSON and every database keep exactly
_BELOW_ONE = ("optimizer.beta1", "optimizer.beta2", "report.speed_tolerance")


def default_num_workers() -> int:
    """The GPUs that this process may use, or 2 where there are none."""
    return num_gpus() or 2


def workers_of(config: TrialConfig) -> int:
    """What `cluster.num_workers` stands for on this machine: null is one worker inline, else the default."""
    if config.cluster.num_workers is not None:
        return config.cluster.num_workers
    return 1 if config.engine is Engine.inline else default_num_workers()


def cpus_per_worker_of(cluster: ClusterConfig) -> float:
    """What `cluster.cpus_per_worker` stands for on this machine; see `default_cpus_per_worker` for null."""
    return cpus_per_gpu() if cluster.cpus_per_worker is None else cluster.cpus_per_worker


def loader_workers_of(config: TrialConfig) -> int:
    """What `data.loader_workers` stands for on this machine; see `default_loader_workers` for null."""
    if config.data.loader_workers is not None:
        return config.data.loader_workers
    return default_loader_workers(num_gpus() > 0, cpus_per_worker_of(config.cluster))


def check_driver() -> None:
    """Refuse GPUs that this PyTorch cannot use: it has no CUDA, or a newer one than the driver supports.

    Within a major version any driver does (NVIDIA's CUDA compatibility guide, minor version compatibility).

    Raises:
        UserError: with both versions.
    """
    found, gpus, built_for = driver(), num_gpus(), pytorch_cuda()
    if not gpus or found is None:
        return
    have = f"this machine has {gpus} {'GPU' if gpus == 1 else 'GPUs'}"
    if built_for is None:
        which = f"for CUDA {found.cuda[0]}" if found.cuda else "with CUDA"
        raise UserError(
            f"{have}, but PyTorch is built without CUDA; install a PyTorch built {which}, or hide the GPUs with "
            'CUDA_VISIBLE_DEVICES="" to train on the CPU.'
        )
    if found.cuda is not None and found.cuda[0] < built_for[0]:
        whose = "its" if gpus == 1 else "their"
        raise UserError(
            f"{have}, but {whose} driver {found.version} supports CUDA {found.cuda[0]}.{found.cuda[1]} at most and "
            f"PyTorch is built for CUDA {built_for[0]}.{built_for[1]}; update the driver to one that supports CUDA "
            f"{built_for[0]}, or install a PyTorch built for CUDA {found.cuda[0]}."
        )


def check_local_capacity(cluster: ClusterConfig, num_workers: int) -> None:
    """Refuse more workers than a Ray that is started here could ever place.

    Raises:
        ConfigError: with what is asked for and what there is.
    """
    if cluster.address is not None:
        return  # another machine's resources are known when it has been reached
    gpus = num_gpus()
    if 0 < gpus < num_workers:
        raise ConfigError(
            f"cluster.num_workers={num_workers} needs a GPU for each, this machine has {gpus}; use "
            f"cluster.num_workers={gpus}, or hide the GPUs with CUDA_VISIBLE_DEVICES='' to train on the CPU."
        )
    each, cores = cpus_per_worker_of(cluster), num_cpus()
    needed = num_workers * each
    if needed > cores:
        fits, share = int(cores / each), math.floor(cores / num_workers * 100) / 100
        fewer = f"cluster.num_workers={fits}, or " if fits else ""
        sharing = ", so that workers share cores" if share < 1 else ""
        raise ConfigError(
            f"cluster.num_workers={num_workers} needs {needed:g} CPUs (cluster.cpus_per_worker={each:g} each), this "
            f"machine has {cores}; use {fewer}cluster.cpus_per_worker={share:g}{sharing}."
        )


def check_trial(config: TrialConfig, num_workers: int) -> None:
    """Refuse a trial that cannot run.

    Args:
        num_workers: the number of ranks that `cluster.num_workers` stands for.

    Raises:
        ConfigError: a value that is wrong alone.
        CombinationError: values that have no meaning together.
    """
    check_ranges(config)
    module_of("model.family", config.model.family)
    module_of("data.name", config.data.name)
    _check_model(config)
    _check_mesh(config, num_workers)
    _check_batch(config, num_workers)
    _check_reshard(config, num_workers)
    _check_precision(config)
    _check_search(config, num_workers)
    storage = config.cluster.storage_path
    if storage is not None and "://" in storage:
        raise ConfigError(
            f"cluster.storage_path={storage}: checkpoints go to a mounted folder, not to an object store; give a "
            "path that every node mounts."
        )


def check_ranges(config: TrialConfig) -> None:
    """
    Raises:
        ConfigError: a number that is too small or too large by itself.
    """
    values = flatten(config)
    rules = (
        (_AT_LEAST_ONE, lambda v: v >= 1, "is below 1; use a whole number of 1 or more"),
        (_NOT_NEGATIVE, lambda v: v >= 0, "is negative; use 0 or more"),
        (_POSITIVE, lambda v: v > 0, "is not above 0; use a positive number"),
        (_POSITIVE, math.isfinite, "is not finite; use a number"),
        (_BELOW_ONE, lambda v: 0 <= v < 1, "is outside [0, 1); use for example 0.9"),
        (("nightly.significance",), lambda v: 0 < v < 0.5, "is outside (0, 0.5); use for example 0.005"),
    )
    for key, value in values.items():
        if type(value) is int and abs(value) > LARGEST_INTEGER:
            raise ConfigError(f"{key}={value} is too large; use at most {LARGEST_INTEGER}.")
    for keys, holds, rule in rules:
        for key in keys:
            if values[key] is not None and not holds(values[key]):
                raise ConfigError(f"{key}={values[key]} {rule}.")


def _check_model(config: TrialConfig) -> None:
    model = config.model
    if model.family != "vit":
        return
    for key in ("patch_size", "num_heads", "mlp_dim"):
        if getattr(model, key) is None:
            raise ConfigError(f"model.{key}=null: a ViT needs it; give model.{key} a number.")
    assert model.patch_size and model.num_heads
    if model.image_size % model.patch_size:
        raise CombinationError(
            f"model.patch_size={model.patch_size} does not divide model.image_size={model.image_size}; "
            f"use one of {_divisors(model.image_size)}.",
            keys=("model.patch_size", "model.image_size"),
        )
    if model.hidden_dim % model.num_heads:
        raise CombinationError(
            f"model.num_heads={model.num_heads} does not divide model.hidden_dim={model.hidden_dim}; "
            f"use one of {_divisors(model.hidden_dim)}.",
            keys=("model.num_heads", "model.hidden_dim"),
        )


def _check_mesh(config: TrialConfig, num_workers: int) -> None:
    sharding = config.sharding
    if sharding.granularity is Granularity.ddp:
        if config.offload.target is not OffloadTarget.none:
            raise CombinationError(
                f"sharding=ddp with offload={config.offload.target.name}: DDP keeps every parameter on its "
                "device, there is nothing to offload; use offload=none or a sharded setting.",
                keys=("sharding", "offload"),
            )
        if sharding.dp_replicate > 1:
            raise CombinationError(
                f"sharding=ddp with sharding.dp_replicate={sharding.dp_replicate}: DDP replicates over all "
                "workers already; use sharding.dp_replicate=1 or a sharded setting.",
                keys=("sharding", "sharding.dp_replicate"),
            )
        for key in ("forward_prefetch", "backward_prefetch"):
            if getattr(sharding, key) is not None:
                raise CombinationError(
                    f"sharding=ddp with sharding.{key}={getattr(sharding, key)}: DDP gathers nothing that could "
                    f"be fetched early; use sharding.{key}=null.",
                    keys=("sharding", f"sharding.{key}"),
                )
    if num_workers % sharding.dp_replicate:
        raise CombinationError(
            f"sharding.dp_replicate={sharding.dp_replicate} does not divide "
            f"cluster.num_workers={num_workers}; use one of {_divisors(num_workers)}.",
            keys=("sharding.dp_replicate", "cluster.num_workers"),
        )
    if sharding.granularity is Granularity.size_based and sharding.min_num_params is None:
        raise ConfigError(
            "sharding.min_num_params=null: sharding=size_based needs the smallest number of parameters that "
            "makes a unit of its own; set for example sharding.min_num_params=20000."
        )


def _check_batch(config: TrialConfig, num_workers: int) -> None:
    training = config.training
    parts = num_workers * training.grad_accum_steps
    if training.global_batch_size % parts:
        below = training.global_batch_size // parts * parts
        choices = f"{below} or {below + parts}" if below else f"{parts}"
        raise CombinationError(
            f"training.global_batch_size={training.global_batch_size} is not divided by "
            f"cluster.num_workers={num_workers} times training.grad_accum_steps={training.grad_accum_steps}"
            f" = {parts}; use for example {choices}.",
            keys=("training.global_batch_size", "cluster.num_workers", "training.grad_accum_steps"),
        )


def _check_reshard(config: TrialConfig, num_workers: int) -> None:
    reshard = config.reshard_after_forward
    if reshard.policy is not ReshardPolicy.to_size or config.sharding.granularity is Granularity.ddp:
        return
    dp_shard = num_workers // config.sharding.dp_replicate
    if reshard.size is None:
        raise ConfigError(
            "reshard_after_forward.size=null: reshard_after_forward=to_size needs the size of the smaller mesh; "
            f"set reshard_after_forward.size to one of {_divisors(dp_shard)}."
        )
    if dp_shard % reshard.size:
        raise CombinationError(
            f"reshard_after_forward.size={reshard.size} does not divide the sharding degree {dp_shard} "
            f"(cluster.num_workers={num_workers} / sharding.dp_replicate={config.sharding.dp_replicate}); "
            f"use one of {_divisors(dp_shard)}.",
            keys=("reshard_after_forward.size", "cluster.num_workers", "sharding.dp_replicate"),
        )


def _check_precision(config: TrialConfig) -> None:
    optimizer = config.optimizer
    if optimizer.name is not OptimizerName.sgd and optimizer.momentum:
        raise CombinationError(
            f"optimizer.momentum={optimizer.momentum} with optimizer={optimizer.name.name}: momentum belongs to "
            "sgd; use optimizer=sgd, or optimizer.beta1 for Adam.",
            keys=("optimizer.momentum", "optimizer"),
        )
    if config.precision.loss_scaling and config.precision.param_dtype is Dtype.bfloat16:
        raise CombinationError(
            "precision.loss_scaling=true with precision.param_dtype=bfloat16: bfloat16 has float32's range and "
            "needs no scaling; use precision.loss_scaling=false or precision=fp16.",
            keys=("precision.loss_scaling", "precision.param_dtype"),
        )
    sharded = config.sharding.granularity is not Granularity.ddp
    if optimizer.implementation is OptimizerImplementation.fused and optimizer.name is OptimizerName.sgd and sharded:
        raise CombinationError(
            "optimizer.implementation=fused with optimizer=sgd: PyTorch has no fused SGD for sharded parameters; "
            "use optimizer.implementation=auto or foreach.",
            keys=("optimizer.implementation", "optimizer", "sharding"),
        )
    if optimizer.implementation is OptimizerImplementation.fused and config.precision.loss_scaling:
        raise CombinationError(
            "optimizer.implementation=fused with precision.loss_scaling=true: fused optimizers unscale by "
            "themselves and cannot do that on sharded gradients; use optimizer.implementation=auto or foreach.",
            keys=("optimizer.implementation", "precision.loss_scaling"),
        )


def objectives(config: TrialConfig) -> list[tuple[str, str]]:
    """`(metric, "min" or "max")` of each objective.

    Raises:
        ConfigError: one that is no metric of a trial, or says no direction.
    """
    if not config.objective:
        raise ConfigError("objective=[] names nothing; use for example objective=[val/loss:min].")
    return [_objective(word, "objective") for word in config.objective]


def stops_on(config: TrialConfig) -> tuple[str, str]:
    """`(metric, "min" or "max")` that the scheduler looks at."""
    return _objective(config.scheduler.metric, "scheduler.metric") if config.scheduler.metric else objectives(config)[0]


def _objective(word: str, key: str) -> tuple[str, str]:
    metric, _, direction = word.rpartition(":")
    if direction not in ("min", "max"):
        raise ConfigError(f"{key}={word} says no direction; use {word}:min or {word}:max.")
    if not can_be_objective(metric):
        known = objective_keys()
        close = difflib.get_close_matches(metric, known, n=1)
        meant = f"did you mean {close[0]}? " if close else ""
        raise ConfigError(f"{key}={word} is not a metric of a trial; {meant}the metrics are: {', '.join(known)}.")
    return metric, direction


def _check_search(config: TrialConfig, num_workers: int) -> None:
    objectives(config)
    stops_on(config)
    if config.scheduler.reduction_factor < 2:
        raise ConfigError(
            f"scheduler.reduction_factor={config.scheduler.reduction_factor} is below 2: asha keeps one trial in so "
            "many; use 2 or more."
        )
    if config.engine is Engine.inline:
        if num_workers != 1:
            raise CombinationError(
                f"engine=inline with cluster.num_workers={num_workers}: a trial in this very process has one worker; "
                "use cluster.num_workers=1, or engine=ray.",
                keys=("engine", "cluster.num_workers"),
            )
        if config.forecast.prune:
            raise CombinationError(
                "engine=inline with forecast.prune=true: nothing is forecast of a trial in this process; use "
                "forecast.prune=false, or engine=ray.",
                keys=("engine", "forecast.prune"),
            )
        if config.scheduler.name is not SchedulerName.fifo:
            raise CombinationError(
                f"engine=inline with scheduler={config.scheduler.name.name}: one trial runs after the other in this "
                "process, and nobody stops it; use scheduler=fifo, or engine=ray.",
                keys=("engine", "scheduler"),
            )


def check_forecast(config: TrialConfig) -> None:
    """Refuse what is asked of a forecast and cannot be answered here.

    Raises:
        ConfigError: no capacity is known, or there is to be no forecast.
    """
    forecast = config.forecast
    for key in ("prune", "largest_microbatch"):
        if getattr(forecast, key) and forecast.capacity_gib is None and not num_gpus():
            raise ConfigError(
                f"forecast.{key}=true needs to know how much fits, and there is no GPU here to ask; set "
                "forecast.capacity_gib, for example forecast.capacity_gib=80."
            )
    if forecast.prune and not forecast.enabled:
        raise ConfigError(
            "forecast.prune=true with forecast.enabled=false: nothing is known before a trial starts; use "
            "forecast.enabled=true."
        )


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)


def effective_settings(config: TrialConfig, num_workers: int) -> dict[str, Any]:
    """What of a config makes a difference: two trials with equal values train identically.

    DDP reshards nothing. `default` keeps the root's parameters, so for `root` it is `never`; and a mesh of
    one worker, or of all, is `never` or `always` by another name (as FSDP2 itself reads it).
    """
    policy, size = config.reshard_after_forward.policy, config.reshard_after_forward.size
    dp_shard = num_workers // config.sharding.dp_replicate
    if config.sharding.granularity is Granularity.ddp:
        reshard: tuple[str, int | None] = ("none", None)
    elif policy is ReshardPolicy.to_size and size in (1, dp_shard):
        reshard = ("never" if size == 1 else "always", None)
    elif policy is ReshardPolicy.default and config.sharding.granularity is Granularity.root:
        reshard = ("never", None)
    else:
        reshard = (policy.name, size if policy is ReshardPolicy.to_size else None)
    values = to_dict(dataclasses.replace(config))
    values["reshard_after_forward"] = reshard
    values["cluster"]["num_workers"] = num_workers
    # a trial trains the same whatever is foretold of it, and however it was come by
    for key in ("forecast", "engine", "search", "scheduler", "objective", "trial_timeout_s", *AFTERWARDS, *RESUME_KEYS):
        del values[key]
    return values


def memory_settings(config: TrialConfig, num_workers: int) -> dict[str, Any]:
    """What of a config changes the memory of an optimizer step: trials that agree share one forecast."""
    values = effective_settings(config, num_workers)
    optimizer, training = config.optimizer, config.training
    return {
        **{key: values[key] for key in ("sharding", "offload", "reshard_after_forward", "model")},
        "num_workers": num_workers,
        "data": config.data.name,  # grey images are held once for all channels
        "precision": {k: v for k, v in values["precision"].items() if k.endswith("_dtype") or k == "loss_scaling"},
        "activation_checkpointing": values["activation_checkpointing"],
        "optimizer": [
            values["optimizer"]["name"],
            values["optimizer"]["implementation"],
            bool(optimizer.weight_decay),
            bool(optimizer.momentum),
        ],
        "batch": [training.global_batch_size, training.grad_accum_steps],
        "clipped": training.max_grad_norm is not None,
    }


def cpu_notes(config: TrialConfig) -> Iterator[str]:
    """Settings that change nothing where there is no GPU, each as a sentence."""
    if config.offload.target is not OffloadTarget.none:
        yield (
            f"offload={config.offload.target.name} has no effect on a CPU: parameters are in host memory "
            "already, and nothing is pinned."
        )


def memory_notes(config: TrialConfig) -> Iterator[str]:
    """Where a profile is of something else than what trains."""
    if config.compile and config.memory_profile is not MemoryProfile.off:
        yield (
            "compile=true: the step that is followed for the memory profile runs eagerly, so its breakdown and the "
            "forecast are those of the model without compile; what the compiler fuses is never held."
        )


def sharding_notes(config: TrialConfig) -> Iterator[str]:
    """What sharding only the root costs, and what does nothing under DDP, for those who did not know."""
    sharding, reshard = config.sharding.granularity, config.reshard_after_forward.policy
    if sharding is Granularity.ddp and reshard is not ReshardPolicy.default:
        yield f"reshard_after_forward={reshard.name} has no effect with sharding=ddp: nothing is sharded."
    if config.sharding.granularity is Granularity.root:
        yield (
            "sharding=root makes one unit of the whole model: all parameters are gathered at once, so the peak "
            "holds the full model and no communication overlaps with computation; sharding=per_block does better."
        )


_FASHION_MNIST_FILES = (
    "train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte",
)  # fmt: skip


def missing_data_message(data: DataConfig) -> str | None:
    """What is wrong with `data.root`, or None when the images are there or need no files."""
    if data.name != "fashion_mnist":
        return None
    folder = Path(data.root).absolute() / "FashionMNIST" / "raw"
    missing = [name for name in _FASHION_MNIST_FILES if not (folder / name).is_file()]
    if not missing:
        return None
    return (
        f"data.root={data.root}: looked for Fashion-MNIST in {folder} and did not find {', '.join(missing)}; "
        "point data.root at the folder that holds FashionMNIST/raw, allow data.download=true where there is "
        "internet, or use data=digits, which needs no files."
    )
