"""A trial as a plain PyTorch script, which prints the trial's losses."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence

from fsdp_lab.config.parallel import Dtype, Granularity, OffloadTarget, ReshardPolicy
from fsdp_lab.config.training import ActivationCheckpointing, StateDtype
from fsdp_lab.redact import redact
from fsdp_lab.takehome.checkpointing import WRAPPERS, checkpointing_lines
from fsdp_lab.takehome.imports import WIDTH, Imports, fold
from fsdp_lab.takehome.loop import epoch_lines, optimizer_lines
from fsdp_lab.takehome.setup import Setup
from fsdp_lab.takehome.workload import data_lines, model_lines, to_device_lines

SCRIPT = "use_pytorch.py"  # beside the report
_FSDP = "torch.distributed.fsdp"
_WRAPPER = (f"{WRAPPERS}:CheckpointWrapper",)
_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"


def to_pytorch(setup: Setup) -> str:
    """Return the script, without passwords.

    Raises:
        UserError: the task is another package's.
    """
    imports = Imports()
    imports.module("os", "sys", "torch", "torch.distributed as dist", "zlib")
    body = [
        *_start(setup, imports),
        *model_lines(setup, imports),
        *data_lines(setup, imports),
        *(_replicate(setup, imports) if setup.is_ddp else _shard(setup, imports)),
        *optimizer_lines(setup, imports),
        *epoch_lines(setup, imports),
        *_end(),
    ]
    lines = [*_head(setup), *(part for line in (*imports.lines(), "", *body) for part in fold(line))]
    return redact("".join(f"{line}\n" for line in lines))


def _head(setup: Setup) -> list[str]:
    path = "PYTHONPATH=. " if setup.config.code() else ""
    name = setup.name.replace("\\", "/").replace('"', "'")
    return [
        *textwrap.wrap(f'"""{name}', WIDTH),
        f"    {path}torchrun --nproc-per-node {setup.world_size} {SCRIPT}",
        "prints the train/loss of every epoch, like the trial. Left out: validation, checkpoints and metrics.",
        "A data set that draws random numbers has other seeds here.",
        *_left_out(setup),
        '"""',
    ]


def _left_out(setup: Setup) -> list[str]:
    """Return what the trial did and the script does not, a line each."""
    if setup.config.optimizer.state_dtype is StateDtype.bf16:
        return ["Not here: optimizer.state_dtype=bf16; Adam's moments are float32, so losses differ a little."]
    return []


def _start(setup: Setup, imports: Imports) -> list[str]:
    lines = [
        *to_device_lines(setup),
        "cuda = torch.cuda.is_available()",
        'device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")',
        "if cuda:",
        "    torch.cuda.set_device(device)",
        f'dist.init_process_group("{setup.config.offload.backend(cuda=True)}" if cuda else "gloo", '
        "device_id=device if cuda else None)",
        "rank, world_size = dist.get_rank(), dist.get_world_size()",
    ]
    if not setup.is_ddp:
        replicas = setup.dp_replicate
        shape, names = "(world_size,)", '("dp_shard",)'
        if replicas > 1:
            shape, names = f"({replicas}, world_size // {replicas})", '("dp_replicate", "dp_shard")'
        lines.append(f"mesh = dist.init_device_mesh(device.type, {shape}, mesh_dim_names={names})")
    return lines


def _end() -> list[str]:
    """Return the lines that end the process.

    A thread of gloo releases the tensors of a collective after it has reported the result, and takes the GIL for that.
    If Python is ending by then, it ends such a thread with `pthread_exit`, which aborts the process
    ("terminate called without an active exception"). No function of PyTorch waits for these threads.
    """
    return [
        "dist.destroy_process_group()",
        "if not cuda:  # threads of gloo may still release tensors, which would abort Python as it ends",
        "    sys.stdout.flush(), os._exit(0)",
    ]


def _prepare_blocks(setup: Setup, imports: Imports) -> list[str]:
    """Return the lines for activation checkpointing, then compile: before anything is sharded."""
    lines = checkpointing_lines(setup, imports, _is_one_of(setup.layout.block_classes, imports, "m"))
    if setup.config.compile_memory_budget is not None:
        imports.module("torch._functorch.config")
        lines.append(f"torch._functorch.config.activation_memory_budget = {setup.config.compile_memory_budget}")
    if setup.config.compile:
        is_block = _is_block(setup, setup.layout.block_classes, imports)
        lines += [f"for module in [m for m in model.modules() if {is_block}]:", "    module.compile()"]
    return lines


def _float8(setup: Setup, imports: Imports) -> list[str]:
    """Return the lines that convert the linear layers of blocks to float8.

    They come before units are listed, because layers are replaced.
    """
    if not setup.config.precision.float8:
        return []
    imports.name("torchao.float8", "Float8LinearConfig"), imports.name("torchao.float8", "convert_to_float8_training")
    is_block = _is_one_of(setup.layout.block_classes, imports, "m")
    return [
        f"inside = {{layer for m in model.modules() if {is_block} for layer in m.modules()}}",
        "def converted(layer, name):  # of sizes that a GPU multiplies in float8",
        "    sizes = (layer.in_features, layer.out_features)",
        "    return layer in inside and type(layer) is torch.nn.Linear and not any(size % 16 for size in sizes)",
        'convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name("rowwise"),'
        " module_filter_fn=converted)",
    ]


def _is_block(setup: Setup, classes: Sequence[str], imports: Imports) -> str:
    """Return the condition that `m` is a block of these classes, or the wrapper that checkpointing replaced it by."""
    mode = setup.config.activation_checkpointing
    plain = _is_one_of(classes, imports, "m")
    if mode is ActivationCheckpointing.none:
        return plain
    wrapped = _is_one_of(_WRAPPER, imports, "m")
    return f"({wrapped} or {plain} and m not in chosen)" if mode is ActivationCheckpointing.every_n else wrapped


def _is_one_of(paths: Sequence[str], imports: Imports, variable: str) -> str:
    """Return the condition that a module is of one of these classes; by name if they cannot be imported."""
    kinds = [imports.kind(path) for path in paths]
    if None not in kinds:
        shown = ", ".join(map(str, kinds))
        return f"isinstance({variable}, {shown if len(kinds) == 1 else f'({shown})'})"
    names = tuple(path.rpartition(":")[2].rpartition(".")[2] for path in paths)
    return f"type({variable}).__name__ in {names}"


def _shard(setup: Setup, imports: Imports) -> list[str]:
    """Return the lines that call `fully_shard` bottom-up, the root last."""
    config = setup.config
    imports.name(_FSDP, "MixedPrecisionPolicy"), imports.name(_FSDP, "fully_shard")
    reshard = {
        ReshardPolicy.always: "True",
        ReshardPolicy.never: "False",
        ReshardPolicy.default: "None",
        ReshardPolicy.to_size: str(config.reshard_after_forward.size),
    }[config.reshard_after_forward.policy]
    dtypes = f"torch.{config.precision.param_dtype.value}, torch.{config.precision.reduce_dtype.value}"
    per_block = config.sharding.granularity is Granularity.per_block
    listed = _units(setup, imports) if setup.layout.units else []
    # `per_block` shards what checkpointing wrapped, the others what lies inside
    prepared = _prepare_blocks(setup, imports)
    lines = [*_float8(setup, imports), *([*prepared, *listed] if per_block else [*listed, *prepared])]
    policy = f"MixedPrecisionPolicy({dtypes})"
    lines.append(f"options = dict(mesh=mesh, mp_policy={policy}, reshard_after_forward={reshard})")
    if config.offload.target is not OffloadTarget.none:
        imports.name(_FSDP, "CPUOffloadPolicy")
        pinned = "cuda" if config.offload.target is OffloadTarget.cpu else "False"
        lines.append(f'options["offload_policy"] = CPUOffloadPolicy(pin_memory={pinned})')
    if setup.layout.units:
        lines += _in_groups(setup) if config.sharding.blocks_per_unit > 1 else []
        lines.append("for module in reversed(units):  # children before their parents")
        lines.append("    fully_shard(module, **options)")
    lines.append("fully_shard(model, **options)")
    sharding = config.sharding
    if sharding.separate_reduce_scatter_group:
        lines.append("model.set_separate_reduce_scatter_group()")
    if setup.layout.units and (sharding.forward_prefetch is not None or sharding.backward_prefetch is not None):
        lines += ["units = [part[0] for part in units]"] if sharding.blocks_per_unit > 1 else []
        lines.append("for i, module in enumerate(units):")
        if (ahead := sharding.forward_prefetch) is not None:
            lines.append(f"    module.set_modules_to_forward_prefetch(units[i + 1 : i + 1 + {ahead}])")
        if (behind := sharding.backward_prefetch) is not None:
            lines.append(f"    module.set_modules_to_backward_prefetch(units[max(0, i - {behind}) : i][::-1])")
    return lines


def _units(setup: Setup, imports: Imports) -> list[str]:
    """Return the lines that list the units: by their classes for `per_block`, else by their names."""
    layout = setup.layout
    if layout.unit_classes and setup.config.sharding.granularity is Granularity.per_block:
        is_unit = _is_block(setup, layout.unit_classes, imports)
        return [f"units = [m for m in model.modules() if {is_unit} and m is not model]"]
    names = f"names = {json.dumps(list(layout.units))}"
    if not any("*" in name for name in layout.units):
        return [names, "units = [model.get_submodule(name) for name in names]"]
    imports.module("re")
    pattern = 're.compile("|".join(names).replace("*", r"\\d+"))'
    return [names, f"names = {pattern}", "units = [m for name, m in model.named_modules() if names.fullmatch(name)]"]


def _in_groups(setup: Setup) -> list[str]:
    """Return the lines that put consecutive children of one module into one unit."""
    size = setup.config.sharding.blocks_per_unit
    return [
        "parts = {}",
        "for name, module in model.named_modules():",
        "    if module in units:",
        '        parts.setdefault(name.rpartition(".")[0], []).append(module)',
        f"units = [part[i : i + {size}] for part in parts.values() for i in range(0, len(part), {size})]",
    ]


def _replicate(setup: Setup, imports: Imports) -> list[str]:
    """Return the lines for DDP, the baseline."""
    version = tuple(int(part) for part in setup.torch.split("+")[0].split(".")[:2] if part.isdigit())
    sync = "forward_sync_buffers" if version >= (2, 15) else "broadcast_buffers"  # its name since 2.15
    unused = ", find_unused_parameters=True" if setup.layout.find_unused else ""
    lines = [
        *_float8(setup, imports),
        *_prepare_blocks(setup, imports),
        "model = torch.nn.parallel.DistributedDataParallel(model.to(device), device_ids=[device] if cuda else None, "
        f"gradient_as_bucket_view=True, {sync}=False{unused})",
    ]
    hook = {Dtype.bfloat16: "bf16_compress_hook", Dtype.float16: "fp16_compress_hook"}
    if (reduce := setup.config.precision.reduce_dtype) in hook:
        lines.append(f"model.register_comm_hook(None, {imports.name(_HOOKS, hook[reduce])})")
    return lines
