"""The private names of PyTorch that only forecasts use, under names of our own; see `memory/torch_private.py`."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.fsdp import FullyShardedDataParallel, _flat_param
from torch.distributed.fsdp import _fully_shard as fsdp_package
from torch.distributed.tensor import _sharding_prop
from torch.library import _scoped_library as scoped_library
from torch.nn.parallel import distributed as ddp

from fsdp_lab.forecast.speed.program import FUSED, Stream
from fsdp_lab.machine.private import Name
from fsdp_lab.memory.torch_private import ITEM, compiled_code_runs

__all__ = ["ITEM", "DataDependentOutputException", "DynamicOutputShapeException", "FakeTensorMode", "scoped_library"]

_HAS_ADDRESS = "_data_ptr_allocated"
_DEVICE_OF_MESH = "_get_device_from_mesh"
_COMPARE_SHAPES = "_verify_param_shape_across_processes"

NAMES = (
    Name("torch.distributed.fsdp._fully_shard._fully_shard", _DEVICE_OF_MESH, ("mesh",)),
    Name("torch.nn.parallel.distributed", _COMPARE_SHAPES),
    Name("torch.distributed.fsdp._flat_param", _HAS_ADDRESS, ("tensor",)),
    Name("torch.distributed.tensor._sharding_prop", "detect_fake_mode"),
    Name("torch._inductor.async_compile", "AsyncCompile.cpp_pybinding", ("argtypes", "source_code")),
    Name("torch._inductor.graph", "GraphLowering._compile_to_module", ()),
    Name("torch._inductor.config", "cpp.vec_isa_ok"),
    Name("torch._dynamo.config", "optimize_ddp"),
    Name("torch._inductor.config", "fx_graph_cache"),
    Name("torch._inductor.config", "compile_threads"),
    Name("torch.amp", "GradScaler._maybe_opt_step", ("optimizer",)),
    Name("torch.library", "_scoped_library"),
)

STEP_IF_FINITE = "_maybe_opt_step"  # the method of a GradScaler that checks for infinite gradients
FLOAT8_PRODUCT = torch.ops.aten._scaled_mm.out
flash_attention = torch.ops.aten._scaled_dot_product_flash_attention
flash_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
efficient_attention = torch.ops.aten._scaled_dot_product_efficient_attention
plain_attention = torch.ops.aten._scaled_dot_product_attention_math
# Kernels of a GPU that read float16 and write float32.
FROM_HALF = {"softmax.int": torch.ops.aten._softmax, "log_softmax.int": torch.ops.aten._log_softmax}
# Collectives as a trace sees them.
FLAT_GATHER = "c10d.allgather_"  # FSDP1's on a CPU; on a GPU FSDP1 calls the next one
ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "c10d._allgather_base_", "c10d._reduce_scatter_base_", "c10d.allreduce_"


OnKernel = Callable[[str, Sequence[Tensor], Sequence[Tensor]], None]


@contextmanager
def kernels_planned(
    device: torch.device, on_kernel: OnKernel, in_compiled: Callable[[], AbstractContextManager[None]] = nullcontext
) -> Iterator[None]:
    """Let PyTorch's compiler compile blocks for fake tensors, without machine code.

    Compiled code then allocates and frees the same tensors as in training, and calls kernels that do nothing.

    Args:
        on_kernel: called with the name, the inputs and the outputs of each fused kernel.
        in_compiled: returns the context for compiled code.
    """
    from torch._dynamo import config as dynamo_config
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.graph import GraphLowering
    from torch.hub import tqdm

    if hasattr(tqdm, "set_lock"):  # by default tqdm creates a semaphore, which a killed process leaves behind
        tqdm.set_lock(threading.RLock())

    def kernel(_: Any, argtypes: Sequence[str], source_code: str) -> Callable[..., None]:
        names = re.findall(r"\b(in_out_ptr|in_ptr|out_ptr)\d+", source_code[source_code.index("kernel(") :])

        def run(*args: Any) -> None:
            tensors = [(name, arg) for name, arg in zip(names, args, strict=False) if isinstance(arg, Tensor)]
            on_kernel(FUSED, *([t for name, t in tensors if side in name] for side in ("in_", "out_")))

        return run

    def allocate(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    load = GraphLowering._compile_to_module

    def load_for_fake_tensors(graph: GraphLowering) -> Any:
        module: Any = load(graph)
        module.empty_strided_cpu = allocate
        module.reinterpret_tensor = torch.as_strided
        module.assert_alignment = lambda *_: None  # it reads a tensor's address
        call = module.call

        def run(args: Any) -> Any:
            with in_compiled():
                return call(args)

        module.call = run
        return module

    try:
        with (
            compiled_code_runs(),
            # No cache has code for fake tensors, compile processes have no work, and the C++ compiler need not test the
            # processor.
            config.patch({"fx_graph_cache": False, "compile_threads": 1, "cpp.vec_isa_ok": True}),
            functorch_config.patch(enable_autograd_cache=False),
            dynamo_config.patch(optimize_ddp=False),  # it splits a block at DDP's buckets, which fails here
            mock.patch.object(AsyncCompile, "cpp_pybinding", kernel),
            mock.patch.object(GraphLowering, "_compile_to_module", load_for_fake_tensors),
        ):
            yield
    finally:
        torch.compiler.reset()  # the code holds the model


@contextmanager
def peers_not_asked(device: torch.device) -> Iterator[None]:
    """Let FSDP and DDP shard on `device` in a process group whose other ranks do not exist."""
    with (
        # fully_shard asks the mesh for its device, and a mesh knows only one CPU
        mock.patch.object(fsdp_package._fully_shard, _DEVICE_OF_MESH, return_value=device),
        # DDP compares its parameters with those of the other ranks
        mock.patch.object(ddp, _COMPARE_SHAPES, return_value=None),
        # FSDP1 asks for the current device, which is always the first CPU, and for the addresses of its tensors
        mock.patch.object(torch.cpu, "current_device", return_value=str(device)),
        mock.patch.object(_flat_param, _HAS_ADDRESS, return_value=True),
        mock.patch.object(Tensor, "pin_memory", lambda tensor: tensor),  # of fake tensors
        # DTensor computes shapes under the active fake mode by default; the recorder would count those unsharded
        # tensors
        mock.patch.object(_sharding_prop, "detect_fake_mode", return_value=None),
    ):
        yield


def flat_streams(model: nn.Module) -> dict[Any, Stream]:
    """Return FSDP1's streams on a CPU, which run nothing, with their role on a GPU. Call it after the first step."""
    if not isinstance(model, FullyShardedDataParallel):
        return {}
    streams = {
        model._unshard_stream: Stream.gather,
        model._pre_unshard_stream: Stream.copy_in,
        model._post_backward_stream: Stream.scatter,
        model._all_reduce_stream: Stream.all_reduce,
    }
    return {stream: is_for for stream, is_for in streams.items() if stream is not model._default_stream}


def is_autocast_on_cuda(name: str) -> bool:
    """Return whether the installed autocast has a GPU rule for an operator of ATen."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCUDA")


def place_of(func: Any, name: str) -> int:
    return [one.name for one in func._schema.arguments].index(name)


def argument(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the value that an operator got for an argument of its schema; None if it got none."""
    names = [one.name for one in func._schema.arguments]
    if name not in names:
        return None
    number = names.index(name)
    return args[number] if number < len(args) else kwargs.get(name)


def written_arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that an operator writes to, by its schema."""
    arguments = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            arguments.append(args[number] if number < len(args) else kwargs.get(argument.name))
    return arguments


def process_group(value: Any) -> dist.ProcessGroup | None:
    """Return the process group that an argument boxes or names; None for any other argument."""
    if isinstance(value, str):
        with suppress(RuntimeError, KeyError, ValueError):  # the name of something else
            return _resolve_process_group(value)  # type: ignore[arg-type]  # of a type that older versions lack
        return None
    if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
        return dist.ProcessGroup.unbox(value)
    return None


def float8_product(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the product of two float8 matrices with their scales."""
    return torch._scaled_mm(a, b, a_scale, b_scale, out_dtype=dtype, use_fast_accum=True)
