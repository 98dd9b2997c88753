"""A trial's setting as one function of plain PyTorch, for the user's own training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import resources

from fsdp_lab.config import TrialConfig, part
from fsdp_lab.config.axes.activation_offload import SMALLEST
from fsdp_lab.config.axes.api import strategy_of
from fsdp_lab.config.axes.compile import compiles_loss
from fsdp_lab.config.axes.precision import Dtype, PrecisionConfig
from fsdp_lab.config.metrics import LABELS
from fsdp_lab.config.ranks import Ranks
from fsdp_lab.config.target import NAMED, nested
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
_IGNORED = {"language": -1, "seq2seq": -100}  # the label to ignore, for losses that may be compiled
_HOOKS = {Dtype.bfloat16: "bf16_compress_hook", Dtype.float16: "fp16_compress_hook"}


def setting_of(trial: TrialRecord) -> str | None:
    """Return a trial's setting as Python code; None if its layout is not known."""
    layout, world_size = read_layout(trial.facts.get("layout")), trial.facts.get("world_size")
    if trial.config is None or layout is None or not isinstance(world_size, int):
        return None
    layout = replace(layout, counts=layout.counts or LABELS in trial.figures)
    title = f"Trial {trial.number}: {' '.join(trial.overrides)}"
    torch_version, allocator = (str(trial.facts.get(name, "")) for name in ("torch", "allocator_settings"))
    config, samples = part(trial.config, TrialConfig), trial.facts.get("data_num_train")
    steps = samples // config.training.global_batch_size if isinstance(samples, int) else None
    steps = trial.facts.get("steps_per_epoch", steps)
    calls = trial.facts.get("calls")
    return to_pytorch(title, config, layout, world_size, torch_version, allocator, trial.notes, steps, calls)


def to_pytorch(
    title: str,
    config: TrialConfig,
    layout: Layout,
    world_size: int,
    torch_version: str,
    allocator: str = "",
    notes: Sequence[str] = (),
    steps_per_epoch: int | None = None,
    calls: Mapping[str, Sequence[str]] | None = None,
) -> str:
    """Return a module of plain PyTorch with a function `parallelize(model)`, and a step in its docstring.

    The module imports only PyTorch, torchao for float8, and the user's optimizer, groups and schedule. This function
    imports nothing that the config names.

    Args:
        layout: how the model was divided.
        world_size: the number of ranks.
        allocator: the settings of PyTorch's allocator in the trial's environment.
        notes: of the trial's ranks.
        steps_per_epoch: of the schedule; None: not known, and the schedule is left out.
        calls: the arguments of the user's `optimizer` and `lr_schedule`, by these names.
    """
    from jinja2 import ChoiceLoader, Environment, FileSystemLoader, PackageLoader

    # by its folder, because importing the package imports PyTorch
    training = resources.files("fsdp_lab.training")
    fragments = FileSystemLoader(str(training / "parallel"))
    loader = ChoiceLoader([PackageLoader("fsdp_lab.report"), fragments])
    templates = Environment(loader=loader, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    version = tuple(int(number) for number in torch_version.split("+")[0].split(".")[:2] if number.isdigit())
    schedule = config.lr_schedule
    arguments = {"optimizer": config.optimizer.arguments, "lr_schedule": schedule.arguments}
    arguments |= {"data": config.data.arguments} if config.data.loader else {}
    left_out = [key for group, values in arguments.items() for key, _ in nested(values, group)]
    constant = schedule.name is LrScheduleName.constant and not schedule.warmup_steps
    # a loader without a length has max_steps
    no_steps = steps_per_epoch is None and not (config.data.loader and config.training.max_steps)
    if not constant and no_steps:
        left_out.append(f"lr_schedule={schedule.name.name}")
    dp_degree = Ranks.of(config.sharding, world_size).dp
    counts = (
        layout.counts
        or config.task.step is not None
        or (config.task.name in COUNTING_TASKS and may_lack_labels(config.task.name, config.data))
    )
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
        imports=[*_imports(config)],
        lr=config.optimizer.lr * (dp_degree if config.optimizer.scale_lr else 1),
        optimizer=_optimizer(config, dp_degree, layout.has_complex, NAMED in (calls or {}).get("optimizer", ())),
        grouped=config.optimizer.groups or config.optimizer.has_groups,
        loader=_loader(config, Ranks.of(config.sharding, world_size)),
        schedule="" if constant or no_steps else _schedule(config, steps_per_epoch, calls or {}),
        steps_per_epoch=steps_per_epoch,
        smallest=SMALLEST,
        offload_source=(training / "activation_offload.py").read_text().partition("\n\n\n")[2],
        ignored=_IGNORED.get(config.task.name),
        left_out=", ".join(left_out),
    )


def _in_docstring(text: str) -> str:
    return text.replace("\\", "/").replace('"', "'")


def _policy(precision: PrecisionConfig) -> str:
    """Return the arguments of `MixedPrecisionPolicy`, as in `fsdp2.mp_policy`, or of FSDP1's `MixedPrecision`."""
    dtypes = {"param_dtype": precision.param_dtype, "reduce_dtype": precision.reduce_dtype}
    if precision.param_dtype is Dtype.float32:
        dtypes = {key: dtype for key, dtype in dtypes.items() if dtype is not Dtype.float32}
    return ", ".join(f"{key}=torch.{dtype.value}" for key, dtype in dtypes.items())


def _pattern(names: Sequence[str]) -> str:
    """Return a regular expression, as a literal, that matches these names; their `*` stands for a number."""
    if not names:
        return ""
    return 'r"' + "|".join(name.replace(".", r"\.").replace("*", r"\d+") for name in names) + '"'


def _imports(config: TrialConfig) -> Iterator[str]:
    """Yield the lines that import the user's code."""
    optimizer = config.optimizer
    names = {optimizer.groups: " as parameter_groups", optimizer.target: "", config.lr_schedule.target: ""}
    names |= {config.task.after_step: " as after_step", config.data.loader: " as make_loader"}
    names |= {config.task.step: " as step", config.task.optimizers: " as make_optimizers"}
    for path, alias in names.items():
        if path is not None:
            module, _, name = path.rpartition(".")
            yield f"from {module} import {name}{alias}"


def _optimizer(config: TrialConfig, dp_degree: int, has_complex: bool, by_names: bool) -> str:
    """Return the call that makes the optimizer."""
    optimizer = config.optimizer
    lr = optimizer.lr * (dp_degree if optimizer.scale_lr else 1)
    holder = "model" if config.task.step is None else "part"
    params = "groups" if optimizer.groups or optimizer.has_groups else f"{holder}.parameters()"
    if optimizer.target is not None:
        params = f"{NAMED}={holder}.{NAMED}()" if by_names else params
        return _call(optimizer.target, params, {"lr": lr, **optimizer.arguments})
    kind = _OPTIMIZERS[optimizer.name]
    own = f"betas=({optimizer.beta1}, {optimizer.beta2})" if kind != "SGD" else f"momentum={optimizer.momentum}"
    kernels = _IMPLEMENTATIONS[optimizer.chosen_implementation(config.precision.loss_scaling, has_complex)]
    given = f"lr={lr}, {own}, weight_decay={optimizer.weight_decay}, {kernels}"
    return f"torch.optim.{kind}({params}, {given})"


def _loader(config: TrialConfig, ranks: Ranks) -> str:
    """Return the call that makes the user's loader; "" without one."""
    if config.data.loader is None:
        return ""
    training = config.training
    size = training.global_batch_size // ranks.dp // training.grad_accum_steps
    rank = "torch.distributed.get_rank()" + (f" // {ranks.tp}" if ranks.tp > 1 else "")
    given = f'split="train", batch_size={size}, rank={rank}, world_size={ranks.dp}, seed={training.seed}'
    return _call("make_loader", given, config.data.arguments)


def _schedule(config: TrialConfig, steps_per_epoch: int | None, calls: Mapping[str, Sequence[str]]) -> str:
    """Return the call that makes the learning-rate schedule."""
    schedule = config.lr_schedule
    if schedule.target is None:
        return "torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor)"
    steps = dict.fromkeys(calls.get("lr_schedule", ()), config.training.num_steps(steps_per_epoch))
    return _call(schedule.target, "optimizer", {**steps, **schedule.arguments})


def _call(path: str, first: str, options: Mapping[str, object]) -> str:
    given = "".join(f", {key}={value!r}" for key, value in options.items() if not isinstance(value, dict))
    return f"{path.rpartition('.')[2]}({first}{given})"
