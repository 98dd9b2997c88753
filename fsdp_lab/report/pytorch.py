"""A trial's setting as one function of plain PyTorch, for the user's own training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fsdp_lab.config import TrialConfig, part
from fsdp_lab.config.parallel import Dtype, Granularity, PrecisionConfig, ReshardPolicy
from fsdp_lab.config.target import nested
from fsdp_lab.config.training import (
    MATRIX_PRODUCTS,
    SAVED_OPERATORS,
    ActivationCheckpointing,
    LrScheduleName,
    OptimizerConfig,
    OptimizerImplementation,
    OptimizerName,
)
from fsdp_lab.record.trial import TrialRecord
from fsdp_lab.training.layout import Layout, read_layout

SCRIPT = "use_pytorch.py"  # in the report's folder
_OPTIMIZERS = {OptimizerName.adam: "Adam", OptimizerName.adamw: "AdamW", OptimizerName.sgd: "SGD"}
_IMPLEMENTATIONS = {
    OptimizerImplementation.fused: "fused=True",
    OptimizerImplementation.foreach: "foreach=True",
    OptimizerImplementation.for_loop: "foreach=False",
}
_RESHARD = {ReshardPolicy.always: "True", ReshardPolicy.never: "False", ReshardPolicy.default: "None"}
_HOOKS = {Dtype.bfloat16: "bf16_compress_hook", Dtype.float16: "fp16_compress_hook"}


def setting_of(trial: TrialRecord) -> str | None:
    """Return a trial's setting as Python code; None if its layout is not known."""
    layout, world_size = read_layout(trial.facts.get("layout")), trial.facts.get("world_size")
    if trial.config is None or layout is None or not isinstance(world_size, int):
        return None
    title = f"Trial {trial.number}: {' '.join(trial.overrides)}"
    return to_pytorch(title, part(trial.config, TrialConfig), layout, world_size, str(trial.facts.get("torch")))


def to_pytorch(title: str, config: TrialConfig, layout: Layout, world_size: int, torch_version: str) -> str:
    """Return a module of plain PyTorch with a function `parallelize(model)`, and a step in its docstring.

    It imports only PyTorch, torchao for float8, and the class of the user's optimizer. Nothing that the config names is
    imported here.

    Args:
        layout: how the model was divided.
        world_size: the number of ranks.
    """
    from jinja2 import Environment, PackageLoader

    loader = PackageLoader("fsdp_lab.report")
    templates = Environment(loader=loader, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    return templates.get_template("pytorch.py.j2").render(
        title=title.replace("\\", "/").replace('"', "'"),
        world_size=world_size,
        **_sharding(config, layout, torch_version),
        **_training(config, world_size, layout.has_complex),
    )


def _sharding(config: TrialConfig, layout: Layout, torch_version: str) -> dict[str, Any]:
    checkpointing, sharding = config.activation_checkpointing, config.sharding
    ddp = sharding.granularity is Granularity.ddp
    with_blocks = config.compile or config.precision.float8 or checkpointing is not ActivationCheckpointing.none
    version = tuple(int(number) for number in torch_version.split("+")[0].split(".")[:2] if number.isdigit())
    saved = [f"torch.ops.{name}" for name in SAVED_OPERATORS if name not in MATRIX_PRODUCTS]
    return {
        "ddp": ddp,
        "backend": "" if config.offload.backend(cuda=True) == "nccl" else config.offload.backend(cuda=True),
        "checkpointing": checkpointing.name,
        "every": config.activation_checkpointing_every if checkpointing is ActivationCheckpointing.every_n else 1,
        "products": ", ".join(f"torch.ops.{name}" for name in MATRIX_PRODUCTS),
        "saved": ", ".join(saved),
        "compile": config.compile,
        "float8": config.precision.float8,
        "tf32": config.precision.tf32,
        "blocks": _pattern(layout.blocks) if with_blocks else "",
        "units": "" if ddp else _pattern(layout.units),
        "forward_methods": config.model.forward_methods if layout.units and not ddp else None,
        "blocks_per_unit": sharding.blocks_per_unit,
        "dp_replicate": sharding.dp_replicate,
        "forward_prefetch": sharding.forward_prefetch,
        "backward_prefetch": sharding.backward_prefetch,
        "separate_reduce_scatter_group": sharding.separate_reduce_scatter_group,
        "param_dtype": config.precision.param_dtype.value,
        "policy": _policy(config.precision),
        "hook": _HOOKS.get(config.precision.reduce_dtype, "") if ddp else "",
        "find_unused": layout.find_unused,
        "reshard": _RESHARD.get(config.reshard_after_forward.policy, str(config.reshard_after_forward.size)),
        "offload": config.offload.target.name,
        "sync_buffers": "forward_sync_buffers" if version >= (2, 15) else "broadcast_buffers",  # its name since 2.15
    }


def _policy(precision: PrecisionConfig) -> str:
    """Return the arguments of FSDP2's `MixedPrecisionPolicy`, as `training.parallelize.mp_policy` has them."""
    dtypes = {"param_dtype": precision.param_dtype, "reduce_dtype": precision.reduce_dtype}
    if precision.param_dtype is Dtype.float32:
        dtypes = {key: dtype for key, dtype in dtypes.items() if dtype is not Dtype.float32}
    return ", ".join(f"{key}=torch.{dtype.value}" for key, dtype in dtypes.items())


def _pattern(names: Sequence[str]) -> str:
    """Return the literal of a regular expression that these names match, in which `*` stands for a number."""
    if not names:
        return ""
    return 'r"' + "|".join(name.replace(".", r"\.").replace("*", r"\d+") for name in names) + '"'


def _training(config: TrialConfig, world_size: int, has_complex: bool) -> dict[str, Any]:
    optimizer, training, precision = config.optimizer, config.training, config.precision
    scaled = precision.loss_scaling
    place = "device" if config.offload.target.name == "none" else '"cpu"'
    schedule = config.lr_schedule
    constant = schedule.name is LrScheduleName.constant and not schedule.warmup_steps
    objects = [key for key, _ in nested(optimizer.arguments, "optimizer")]
    return {
        "scaled": scaled,
        "scaler": f"{place}, init_scale={precision.init_scale}, growth_interval={precision.growth_interval}",
        "backward": "scaler.scale(loss).backward()" if scaled else "loss.backward()",
        **_optimizer(optimizer, optimizer.lr * (world_size if optimizer.scale_lr else 1), scaled, has_complex),
        "accum": training.grad_accum_steps,
        "sync_each": training.sync_each_microbatch,
        "microbatch_size": training.global_batch_size // world_size // training.grad_accum_steps,
        "max_grad_norm": training.max_grad_norm,
        "left_out": ", ".join([*objects, *([] if constant else [f"lr_schedule={schedule.name.name}"])]),
    }


def _optimizer(optimizer: OptimizerConfig, lr: float, scaled: bool, has_complex: bool) -> dict[str, str]:
    if optimizer.target is not None:
        module, _, name = optimizer.target.rpartition(".")
        options = {"lr": lr, **optimizer.arguments}
        given = ", ".join(f"{key}={value!r}" for key, value in options.items() if not isinstance(value, dict))
        return {"optimizer": name, "optimizer_options": given, "optimizer_import": f"from {module} import {name}"}
    kind = _OPTIMIZERS[optimizer.name]
    own = f"betas=({optimizer.beta1}, {optimizer.beta2})" if kind != "SGD" else f"momentum={optimizer.momentum}"
    kernels = _IMPLEMENTATIONS[optimizer.chosen_implementation(scaled, has_complex)]
    return {
        "optimizer": f"torch.optim.{kind}",
        "optimizer_options": f"lr={lr}, {own}, weight_decay={optimizer.weight_decay}, {kernels}",
    }
