"""A trial as a plain PyTorch script, which prints the trial's losses."""

from __future__ import annotations

from typing import Any

from fsdp_lab.config.errors import UserError
from fsdp_lab.config.parallel import Dtype, Granularity, ReshardPolicy
from fsdp_lab.config.training import (
    MATRIX_PRODUCTS,
    SAVED_OPERATORS,
    ActivationCheckpointing,
    Init,
    LrScheduleName,
    OptimizerImplementation,
    OptimizerName,
)
from fsdp_lab.config.workload import EXAMPLE_BATCH
from fsdp_lab.redact import redact
from fsdp_lab.takehome.imports import Imports, break_lines, without_unused_imports
from fsdp_lab.takehome.setup import Setup

SCRIPT = "use_pytorch.py"  # in the report's folder
_WHOLE_CONSTRUCTOR = 2**32  # bytes of parameters that a trial draws by one call of the constructor
_TASKS = ("classification", "language", "seq2seq", "model_loss", "custom")
_TRANSFORMERS = "fsdp_lab.workloads.hf.models."
_AUTO_CLASSES = {
    "causal_lm": "AutoModelForCausalLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "image_classification": "AutoModelForImageClassification",
}
_OPTIMIZERS = {OptimizerName.adam: "Adam", OptimizerName.adamw: "AdamW", OptimizerName.sgd: "SGD"}
_IMPLEMENTATIONS = {
    OptimizerImplementation.fused: "fused=True",
    OptimizerImplementation.foreach: "foreach=True",
    OptimizerImplementation.for_loop: "foreach=False",
}
_RESHARD = {ReshardPolicy.always: "True", ReshardPolicy.never: "False", ReshardPolicy.default: "None"}
_HOOKS = {Dtype.bfloat16: "bf16_compress_hook", Dtype.float16: "fp16_compress_hook"}


def to_pytorch(setup: Setup) -> str:
    """Return the script, without passwords.

    Raises:
        UserError: the task is another package's.
    """
    from jinja2 import Environment, PackageLoader

    loader = PackageLoader("fsdp_lab.takehome", ".")
    made = Environment(loader=loader, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    imports, config = Imports(), setup.config
    if config.task.name not in _TASKS:
        raise UserError(f"task={config.task.name} is another package's; no script can be written of it.")
    values = {**_workload(setup, imports), **_sharding(setup, imports), **_training(setup)}
    text = made.get_template("script.py.j2").render(
        setup=setup,
        name=setup.name.replace("\\", "/").replace('"', "'"),
        config=config,
        training=config.training,
        task=config.task,
        sharding=config.sharding,
        layout=setup.layout,
        imports=imports.lines(),
        **values,
    )
    head, body = text.split("\n\n", 1)
    body = break_lines("\n".join(line for line in body.splitlines() if line.strip()))
    return redact(f"{without_unused_imports(head, body)}\n\n{body}\n")


def _workload(setup: Setup, imports: Imports) -> dict[str, Any]:
    """Return the expressions for the model with the trial's first weights, the data and the loss."""
    model, data, task = setup.config.model, setup.config.data, setup.config.task
    weights = "the trial's first weights; every rank builds all of them on the host"
    if setup.config.init is Init.device:
        weights = "on GPUs other first weights than the trial's, which the GPUs drew"
    elif setup.num_params * 4 > _WHOLE_CONSTRUCTOR:
        weights = "other first weights than the trial's, which drew them in parts"
    pretrained, target = "", str(model.target)
    auto_class = _AUTO_CLASSES.get(target.removeprefix(_TRANSFORMERS))
    built = imports.call(target, model.arguments)
    if auto_class and model.arguments.get("pretrained"):
        options = f"{model.arguments['config']!r}, use_safetensors=True, dtype=torch.float32"
        pretrained = f"{imports.path(f'transformers.{auto_class}')}.from_pretrained({options})"
    example = data.target == EXAMPLE_BATCH
    items = "" if example else imports.call(str(data.target), {**setup.data_arguments, "split": "train"})
    workers = "4 if cuda else 0" if data.loader_workers is None else data.loader_workers
    collate = f", collate_fn={imports.path(data.collate_fn)}" if data.collate_fn else ""
    loader = f"torch.utils.data.DataLoader(items, batch_sampler=mine.tolist(){collate}, num_workers={workers})"
    return {
        "weights": weights,
        "ours": model.is_image_classifier,
        "model": built,
        "auto_class": auto_class,
        "pretrained": pretrained,
        "example": example,
        "items": items,
        "loader": "[example] * len(mine)" if example else loader,
        "loss": imports.path(str(task.loss)) if task.name == "custom" else "",
    }


def _sharding(setup: Setup, imports: Imports) -> dict[str, Any]:
    config, layout = setup.config, setup.layout
    checkpointing = config.activation_checkpointing
    per_block = config.sharding.granularity is Granularity.per_block
    with_blocks = config.compile or config.precision.float8 or checkpointing is not ActivationCheckpointing.none
    version = tuple(int(part) for part in setup.torch.split("+")[0].split(".")[:2] if part.isdigit())
    saved = [f"torch.ops.{name}" for name in SAVED_OPERATORS if name not in MATRIX_PRODUCTS]
    return {
        "backend": config.offload.backend(cuda=True),
        "checkpointing": checkpointing.name,
        "every": config.activation_checkpointing_every,
        "products": ", ".join(f"torch.ops.{name}" for name in MATRIX_PRODUCTS),
        "saved": ", ".join(saved),
        "block": imports.is_one_of(layout.block_classes) if with_blocks else "",
        "unit": imports.is_one_of(layout.unit_classes) if layout.unit_classes and per_block else "",
        "per_block": per_block,
        "param_dtype": config.precision.param_dtype.value,
        "reduce_dtype": config.precision.reduce_dtype.value,
        "hook": _HOOKS.get(config.precision.reduce_dtype, "") if setup.is_ddp else "",
        "reshard": _RESHARD.get(config.reshard_after_forward.policy, str(config.reshard_after_forward.size)),
        "offload": config.offload.target.name,
        "sync_buffers": "forward_sync_buffers" if version >= (2, 15) else "broadcast_buffers",  # its name since 2.15
    }


def _training(setup: Setup) -> dict[str, Any]:
    optimizer, training = setup.config.optimizer, setup.config.training
    scaled = setup.config.precision.loss_scaling
    kind = _OPTIMIZERS[optimizer.name]
    own = f"betas=({optimizer.beta1}, {optimizer.beta2})" if kind != "SGD" else f"momentum={optimizer.momentum}"
    kernels = _IMPLEMENTATIONS[optimizer.chosen_implementation(scaled)]
    per_epoch = setup.num_train // training.global_batch_size
    return {
        "scaled": scaled,
        "optimizer": kind,
        "optimizer_options": f"{own}, weight_decay={optimizer.weight_decay}, {kernels}",
        "schedule": _schedule(setup, per_epoch),
        "per_epoch": per_epoch,
        "epochs": -(-setup.num_steps // per_epoch),
    }


def _schedule(setup: Setup, per_epoch: int) -> str:
    """Return the factor of the learning rate as an expression of `step`; "" for a constant one."""
    schedule = setup.config.lr_schedule
    factor, warmup = "", schedule.warmup_steps
    if schedule.name is LrScheduleName.cosine:
        low, left = schedule.min_lr_ratio, max(1, per_epoch * setup.config.training.epochs - warmup)
        done = f"min(1.0, (step - {warmup}) / {left})"
        factor = f"{f'{low} + {1 - low} * ' if low else ''}0.5 * (1 + math.cos(math.pi * {done}))"
    elif schedule.name is LrScheduleName.step:
        factor = f"{schedule.gamma} ** (step // {per_epoch * schedule.step_epochs})"
    return f"(step + 1) / {warmup} if step < {warmup} else {factor or '1.0'}" if warmup else factor
