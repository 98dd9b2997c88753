"""A trial's setting as one function of plain PyTorch, for the user's own training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import resources

from fsdp_lab.config import TrialConfig, part
from fsdp_lab.config.axes.api import strategy_of
from fsdp_lab.config.axes.compile import compiles_loss
from fsdp_lab.config.axes.precision import Dtype, PrecisionConfig
from fsdp_lab.config.metrics import LABELS
from fsdp_lab.config.ranks import Ranks
from fsdp_lab.config.target import nested
from fsdp_lab.config.training import (
    MATRIX_PRODUCTS,
    SAVED_OPERATORS,
    LrScheduleName,
    OptimizerImplementation,
    OptimizerName,
)
from fsdp_lab.config.workload import COUNTING_TASKS, may_lack_labels
from fsdp_lab.record.trial import TrialRecord
from fsdp_lab.training.layout import Layout, read_layout

SCRIPT = "use_pytorch.py"  # in the report's folder
_OPTIMIZERS = {OptimizerName.adam: "Adam", OptimizerName.adamw: "AdamW", OptimizerName.sgd: "SGD"}
_IMPLEMENTATIONS = {
    OptimizerImplementation.fused: "fused=True",
    OptimizerImplementation.foreach: "foreach=True",
    OptimizerImplementation.for_loop: "foreach=False",
}
_IGNORED = {"language": -1, "seq2seq": -100}  # the label of what does not count in a loss that may be compiled
_HOOKS = {Dtype.bfloat16: "bf16_compress_hook", Dtype.float16: "fp16_compress_hook"}


def setting_of(trial: TrialRecord) -> str | None:
    """Return a trial's setting as Python code; None if its layout is not known."""
    layout, world_size = read_layout(trial.facts.get("layout")), trial.facts.get("world_size")
    if trial.config is None or layout is None or not isinstance(world_size, int):
        return None
    layout = replace(layout, counts=layout.counts or LABELS in trial.figures)
    title = f"Trial {trial.number}: {' '.join(trial.overrides)}"
    torch_version, allocator = (str(trial.facts.get(name, "")) for name in ("torch", "allocator_settings"))
    notes = trial.notes
    return to_pytorch(title, part(trial.config, TrialConfig), layout, world_size, torch_version, allocator, notes)


def to_pytorch(
    title: str,
    config: TrialConfig,
    layout: Layout,
    world_size: int,
    torch_version: str,
    allocator: str = "",
    notes: Sequence[str] = (),
) -> str:
    """Return a module of plain PyTorch with a function `parallelize(model)`, and a step in its docstring.

    It imports only PyTorch, torchao for float8, and the class of the user's optimizer. Nothing that the config names is
    imported here.

    Args:
        layout: how the model was divided.
        world_size: the number of ranks.
        allocator: the settings of PyTorch's allocator in the trial's environment.
        notes: what the trial's ranks noted.
    """
    from jinja2 import ChoiceLoader, Environment, FileSystemLoader, PackageLoader

    # by its folder: to import the package is to import PyTorch
    fragments = FileSystemLoader(str(resources.files("fsdp_lab.training") / "parallel"))
    loader = ChoiceLoader([PackageLoader("fsdp_lab.report"), fragments])
    templates = Environment(loader=loader, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    version = tuple(int(number) for number in torch_version.split("+")[0].split(".")[:2] if number.isdigit())
    schedule, objects = config.lr_schedule, [key for key, _ in nested(config.optimizer.arguments, "optimizer")]
    constant = schedule.name is LrScheduleName.constant and not schedule.warmup_steps
    dp_degree = Ranks.of(config.sharding, world_size).dp
    counts = layout.counts or (config.task.name in COUNTING_TASKS and may_lack_labels(config.task.name, config.data))
    return templates.get_template("pytorch.py.j2").render(
        title=_in_docstring(title),
        notes=[_in_docstring(note) for note in notes],
        config=config,
        layout=layout,
        counts=counts,
        world_size=world_size,
        allocator=_in_docstring(allocator),
        compiles_loss=compiles_loss(config),
        strategy=strategy_of(config),
        kind=config.sharding.kind,
        pattern=_pattern,
        products=[f"torch.ops.{name}" for name in MATRIX_PRODUCTS],
        saved=[f"torch.ops.{name}" for name in SAVED_OPERATORS if name not in MATRIX_PRODUCTS],
        policy=_policy(config.precision),
        hook="" if config.precision.is_narrow else _HOOKS.get(config.precision.reduce_dtype, ""),
        sync_buffers="forward_sync_buffers" if version >= (2, 15) else "broadcast_buffers",  # its name since 2.15
        microbatch=config.training.global_batch_size // dp_degree // config.training.grad_accum_steps,
        optimizer=_optimizer(config, dp_degree, layout.has_complex),
        ignored=_IGNORED.get(config.task.name),
        left_out=", ".join([*objects, *([] if constant else [f"lr_schedule={schedule.name.name}"])]),
    )


def _in_docstring(text: str) -> str:
    return text.replace("\\", "/").replace('"', "'")


def _policy(precision: PrecisionConfig) -> str:
    """Return the arguments of `MixedPrecisionPolicy`, as `fsdp2.mp_policy` has them, or of FSDP1's."""
    dtypes = {"param_dtype": precision.param_dtype, "reduce_dtype": precision.reduce_dtype}
    if precision.param_dtype is Dtype.float32:
        dtypes = {key: dtype for key, dtype in dtypes.items() if dtype is not Dtype.float32}
    return ", ".join(f"{key}=torch.{dtype.value}" for key, dtype in dtypes.items())


def _pattern(names: Sequence[str]) -> str:
    """Return the literal of a regular expression that these names match, in which `*` stands for a number."""
    if not names:
        return ""
    return 'r"' + "|".join(name.replace(".", r"\.").replace("*", r"\d+") for name in names) + '"'


def _optimizer(config: TrialConfig, dp_degree: int, has_complex: bool) -> tuple[str, str]:
    """Return the line that imports the user's own optimizer, or "", and the call that makes the optimizer."""
    optimizer = config.optimizer
    lr = optimizer.lr * (dp_degree if optimizer.scale_lr else 1)
    if optimizer.target is not None:
        module, _, name = optimizer.target.rpartition(".")
        options = {"lr": lr, **optimizer.arguments}
        given = ", ".join(f"{key}={value!r}" for key, value in options.items() if not isinstance(value, dict))
        return f"from {module} import {name}", f"{name}(model.parameters(), {given})"
    kind = _OPTIMIZERS[optimizer.name]
    own = f"betas=({optimizer.beta1}, {optimizer.beta2})" if kind != "SGD" else f"momentum={optimizer.momentum}"
    kernels = _IMPLEMENTATIONS[optimizer.chosen_implementation(config.precision.loss_scaling, has_complex)]
    given = f"lr={lr}, {own}, weight_decay={optimizer.weight_decay}, {kernels}"
    return "", f"torch.optim.{kind}(model.parameters(), {given})"
