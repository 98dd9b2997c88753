"""Every private name of PyTorch that is used, under names of our own.

`tests/training/test_torch_private.py` tries each of `NAMES` and names the missing one. Without a name in `OPTIONAL`
something costs more, as its function says. Without any other, this module or the code that needs the name fails.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FakeWork
from torch._C._profiler import _EventType
from torch._functorch import config as functorch_config
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.distributed._tools.common_utils import get_untyped_storages
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.fsdp import FSDPModule, _common_utils
from torch.distributed.fsdp import _fully_shard as fsdp_package
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import _sharding_prop
from torch.nn.parallel import distributed as ddp
from torch.utils._python_dispatch import TorchDispatchMode as _DispatchMode
from torch.utils._python_dispatch import _disable_current_modes

from fsdp_lab.machine.private import Name

__all__ = [
    "DataDependentOutputException", "DynamicOutputShapeException", "FakeTensorMode", "TorchDispatchMode",
    "active_fake_mode",
]  # fmt: skip

_POST_FORWARD_MESH = "_get_post_forward_mesh_info"
_CLEAR_WORKSPACES = "_cuda_clearCublasWorkspaces"
_DEVICE_OF_MESH = "_get_device_from_mesh"
_COMPARE_SHAPES = "_verify_param_shape_across_processes"

# Before 2.15 FSDP2 copied every list and dictionary that a unit gets; since then only those with a gradient inside.
REBUILDS_INPUTS = not hasattr(_common_utils, "replace_grad_tensors")

_FSDP = "torch.distributed.fsdp._fully_shard._fully_shard"
_FSDP_STATE = "torch.distributed.fsdp._fully_shard._fsdp_state"
_FSDP_COLLECTIVES = "torch.distributed.fsdp._fully_shard._fsdp_collectives"

OPTIONAL = (
    Name(_FSDP, _POST_FORWARD_MESH, ("reshard_after_forward", "mesh_info")),
    Name("torch._C", _CLEAR_WORKSPACES),
)
NAMES = (
    *OPTIONAL,
    # of training
    Name("torch.cuda.memory", "_record_memory_history", ("enabled", "max_entries", "stacks")),
    Name("torch.cuda.memory", "_dump_snapshot", ("filename",)),
    Name(f"{_FSDP_COLLECTIVES}", "DefaultAllGather.allocate", ("size", "dtype", "device")),
    Name(f"{_FSDP_COLLECTIVES}", "DefaultReduceScatter.allocate", ("size", "dtype", "device")),
    # of a step that is followed
    Name(_FSDP_STATE, "FSDPState._pre_backward", ("grad",)),
    Name(_FSDP, "FSDPModule._get_fsdp_state", ()),
    Name("torch", "Tensor._base"),
    Name("torch._C", "_current_graph_task_id"),
    Name("torch.distributed._tools.common_utils", "get_untyped_storages", ("t",)),
    Name("torch._guards", "active_fake_mode"),
    Name("torch", "Tensor._use_count"),
    Name("torch", "Tensor._version"),
    Name("torch._C", "_storage_Use_Count"),
    Name("torch._C._profiler", "_EventType.Allocation"),
    Name("torch._C._distributed_c10d", "FakeWork.boxed"),
    Name("torch.utils._python_dispatch", "TorchDispatchMode.ignore_compile_internals", ()),
    Name("torch", "ops.c10d._allgather_base_.default"),
    Name("torch", "ops.c10d._reduce_scatter_base_.default"),
    Name("torch", "ops._c10d_functional.all_reduce.default"),
    Name("torch", "ops._c10d_functional.all_gather_into_tensor.default"),
    Name("torch", "ops._c10d_functional.reduce_scatter_tensor.default"),
    Name("torch", "ops._c10d_functional.wait_tensor"),
    # of forecasts
    Name("torch.distributed.distributed_c10d", "_resolve_process_group"),
    Name("torch", "ops.aten._scaled_mm.out"),
    Name("torch._subclasses.fake_tensor", "FakeTensor"),
    Name("torch._subclasses.fake_tensor", "FakeTensorMode"),
    Name("torch._subclasses.fake_tensor", "DataDependentOutputException"),
    Name("torch._subclasses.fake_tensor", "DynamicOutputShapeException"),
    Name("torch.utils._python_dispatch", "_disable_current_modes"),
    Name("torch.nn", "Module._apply", ("fn",)),
    Name(_FSDP, _DEVICE_OF_MESH, ("mesh",)),
    Name("torch.nn.parallel.distributed", _COMPARE_SHAPES),
    Name("torch.distributed.tensor._sharding_prop", "detect_fake_mode"),
    Name("torch._inductor.async_compile", "AsyncCompile.cpp_pybinding", ("argtypes", "source_code")),
    Name("torch._inductor.graph", "GraphLowering._compile_to_module", ()),
    Name("torch._inductor.config", "cpp.vec_isa_ok"),
    Name("torch._dynamo.config", "optimize_ddp"),
    Name("torch._inductor.config", "fx_graph_cache"),
    Name("torch._inductor.config", "compile_threads"),
    Name("torch._functorch.config", "enable_autograd_cache"),
    Name("torch.amp", "GradScaler._maybe_opt_step", ("optimizer",)),
    Name("torch", "ops.aten._local_scalar_dense.default"),
    Name("torch", "ops.prim.device.default"),
    Name("torch", "ops.aten._scaled_dot_product_flash_attention"),
    Name("torch", "ops.aten._scaled_dot_product_flash_attention_backward"),
    Name("torch", "ops.aten._scaled_dot_product_efficient_attention"),
    Name("torch", "ops.aten._scaled_dot_product_attention_math"),
)

STEP_IF_FINITE = "_maybe_opt_step"  # the method of a GradScaler that asks whether a gradient was infinite

GATHER, SCATTER = torch.ops.c10d._allgather_base_.default, torch.ops.c10d._reduce_scatter_base_.default  # output, input
FUNCTIONAL_COLLECTIVES = (
    torch.ops._c10d_functional.all_reduce.default,
    torch.ops._c10d_functional.all_gather_into_tensor.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
)
wait_for_functional = torch.ops._c10d_functional.wait_tensor
ITEM = torch.ops.aten._local_scalar_dense.default
FLOAT8_PRODUCT = torch.ops.aten._scaled_mm.out
DEVICE = torch.ops.prim.device.default  # where a fake tensor is, asked by C++: two of three operators of its step
flash_attention = torch.ops.aten._scaled_dot_product_flash_attention
flash_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
efficient_attention = torch.ops.aten._scaled_dot_product_efficient_attention
plain_attention = torch.ops.aten._scaled_dot_product_attention_math


class TorchDispatchMode(_DispatchMode):
    """A mode under which code that is to be compiled runs eagerly, except inside of `compiled_code_runs`.

    There the mode sees the operators that compiled code calls.
    """

    _compiled = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return whether compiled code may run under it, as PyTorch asks."""
        return TorchDispatchMode._compiled


@contextmanager
def compiled_code_runs() -> Iterator[None]:
    """Let code be compiled, and run compiled, under our modes that are entered inside."""
    with mock.patch.object(TorchDispatchMode, "_compiled", True):
        yield


def _units_of(model: nn.Module) -> list[Any]:
    """Return FSDP2's state of each unit, in the order of its modules."""
    states = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
    return list({id(state): state for state in states}.values())


def collectives_announced(model: nn.Module, comes: Callable[[str], None]) -> int:
    """Call `comes` before a unit gathers or reduces, with what it does in words; return the number of units.

    A reduction is announced once for what goes in, and once for what comes out.
    """

    def announcing(base: Any, does: str) -> Any:
        class Announcing(base):  # type: ignore[misc]
            def allocate(self, size: Sequence[int], **kwargs: Any) -> Tensor:
                comes(does.format(size=size[0]))
                return super().allocate(size, **kwargs)  # type: ignore[no-any-return]

        return Announcing()

    names = {module: name for name, module in model.named_modules()}
    units = _units_of(model)
    for state in units:
        unit = ", ".join(names[module] or "the root" for module in state._modules)
        if (group := state._fsdp_param_group) is not None:
            group._all_gather_comm = announcing(DefaultAllGather, f"gathers the weights of {unit}")
            group._reduce_scatter_comm = announcing(DefaultReduceScatter, f"reduces {{size}} gradients of {unit}")
    return len(units)


def unsharded_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter, nn.Parameter]]:
    """Return each parameter that was gathered once: its name, its shard, and the copy, whose memory may be freed."""
    groups = [group for state in _units_of(model) if (group := state._fsdp_param_group) is not None]
    parameters = [parameter for group in groups for parameter in group.fsdp_params]
    return [
        (p._param_fqn or "", p.sharded_param, p._unsharded_param) for p in parameters if hasattr(p, "_unsharded_param")
    ]


class AccumulatesInPlace(TorchDispatchMode):
    """Adds up the gradients of a tensor that is used more than once as they are without a mode: in place.

    PyTorch's autograd engine adds the second gradient to the first one in place if nothing else holds that. Under any
    dispatch mode it makes a third tensor instead, so a step that is followed would hold more than one that trains.
    """

    def __init__(self) -> None:
        super().__init__()
        self._alone: set[tuple[int, int]] = set()  # the references to a gradient that nothing but the engine holds
        self._seen: list[tuple[int, int]] | None = None

    def learn(self, device: torch.device) -> None:
        """Learn to recognize a gradient that only the engine holds; called once all modes are entered."""
        self._alone = self._counts(lambda x: x * 2 + x * 3, device) - self._counts(lambda x: x + x * 3, device)

    def _counts(self, function: Callable[[Tensor], Tensor], device: torch.device) -> set[tuple[int, int]]:
        self._seen = []
        with torch.enable_grad():
            x = torch.zeros(1, device=device, requires_grad=True)
            torch.autograd.grad(function(x.clone()), x)
        counts, self._seen = set(self._seen), None
        return counts

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.ops.aten.add.Tensor and not kwargs and not torch.is_grad_enabled() and _of_the_engine():
            first, second = args
            references = first._use_count(), sys.getrefcount(first)  # in C++, and in Python, such as a hook's
            if self._seen is not None:
                self._seen.append(references)
            elif references in self._alone and _alike(first, second) and _has_storage_alone(first):
                return first.add_(second)
        return func(*args, **(kwargs or {}))


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was written in place; some kernels do not count."""
    return tensor._version


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is dense and of no class of its own, but for a fake one."""
    return (type(tensor) is Tensor or isinstance(tensor, FakeTensor)) and tensor.layout is torch.strided


def _alike(first: Tensor, second: Tensor) -> bool:
    return _is_plain(first) and _is_plain(second) and first.shape == second.shape and first.dtype is second.dtype


def _has_storage_alone(tensor: Tensor) -> bool:
    """Return whether a tensor fills its storage, and no other tensor has that."""
    storage = tensor.untyped_storage()
    holders = torch._C._storage_Use_Count(storage._cdata) - 1  # without the one that is asked
    return holders == 1 and storage.nbytes() == tensor.numel() * tensor.element_size()


_TORCH = str(Path(torch.__file__).parent)  # which wraps the methods of modes


def _of_the_engine() -> bool:
    """Return whether the autograd engine itself calls an operator, and not a function in Python."""
    frame: FrameType | None = sys._getframe(2)
    while frame and frame.f_code.co_name in ("_fn", "inner") and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    return frame is None or frame.f_code.co_name == "_engine_run_backward"


OnKernel = Callable[[str, Sequence[Tensor], Sequence[Tensor]], None]


@contextmanager
def kernels_planned(device: torch.device, on_kernel: OnKernel) -> Iterator[None]:
    """Let blocks be compiled for fake tensors, by PyTorch's compiler but for the machine code.

    Compiled code then allocates and frees the tensors that it does in training, and calls kernels that do nothing.

    Args:
        on_kernel: called with the name, the inputs and the outputs of each fused kernel.
    """
    from torch._dynamo import config as dynamo_config
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.graph import GraphLowering
    from torch.hub import tqdm

    if hasattr(tqdm, "set_lock"):  # else tqdm makes one from a semaphore, which a killed process leaves behind
        tqdm.set_lock(threading.RLock())

    def kernel(_: Any, argtypes: Sequence[str], source_code: str) -> Callable[..., None]:
        names = re.findall(r"\b(in_out_ptr|in_ptr|out_ptr)\d+", source_code[source_code.index("kernel(") :])

        def run(*args: Any) -> None:
            tensors = [(name, arg) for name, arg in zip(names, args, strict=False) if isinstance(arg, Tensor)]
            on_kernel("fused", *([t for name, t in tensors if side in name] for side in ("in_", "out_")))

        return run

    def allocate(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    load = GraphLowering._compile_to_module

    def load_for_fake_tensors(graph: GraphLowering) -> Any:
        module: Any = load(graph)
        module.empty_strided_cpu = allocate
        module.reinterpret_tensor = torch.as_strided
        module.assert_alignment = lambda *_: None  # it asks for a tensor's address
        return module

    try:
        with (
            compiled_code_runs(),
            # no cache has code for fake tensors, processes that compile have nothing to do, and what the processor can
            # do is not found out by running the C++ compiler
            config.patch({"fx_graph_cache": False, "compile_threads": 1, "cpp.vec_isa_ok": True}),
            functorch_config.patch(enable_autograd_cache=False),
            dynamo_config.patch(optimize_ddp=False),  # it divides a block at DDP's buckets, and fails for fake tensors
            mock.patch.object(AsyncCompile, "cpp_pybinding", kernel),
            mock.patch.object(GraphLowering, "_compile_to_module", load_for_fake_tensors),
        ):
            yield
    finally:
        torch.compiler.reset()  # the code holds the model


@contextmanager
def one_post_forward_mesh() -> Iterator[None]:
    """Let every `fully_shard` call inside that reshards to a smaller mesh use the same mesh.

    PyTorch makes a mesh for each call, with its own process groups and communicators: about 150 for the 25 units of a
    ViT-L/16 on 8 workers. If the private function is missing, PyTorch's own behaviour stays.
    """
    module = getattr(fsdp_package, "_fully_shard", None)
    make: Callable[..., Any] | None = getattr(module, _POST_FORWARD_MESH, None)
    if make is None:
        yield
        return
    made: dict[Any, Any] = {}

    def make_once(reshard_after_forward: Any, mesh_info: Any) -> Any:
        if isinstance(reshard_after_forward, bool):
            return make(reshard_after_forward, mesh_info)
        key = (reshard_after_forward, mesh_info.mesh)
        if key not in made:
            made[key] = make(reshard_after_forward, mesh_info)
        return made[key]

    with mock.patch.object(module, _POST_FORWARD_MESH, make_once):
        yield


def gather_before_gradient_of(tensor: Tensor, unit: nn.Module) -> None:
    """Let the backward pass gather the parameters of a sharded unit before the gradient of a tensor is used.

    A view that is changed in place loses what it was told, so its base is told, too.
    """
    assert isinstance(unit, FSDPModule)
    for told in (tensor, tensor._base):
        if told is not None and told.requires_grad and told.grad_fn is not None:
            told.register_hook(unit._get_fsdp_state()._pre_backward)


def free_cublas_workspaces(device: torch.device) -> int | None:
    """Free cuBLAS's workspaces; the next matrix product allocates them again.

    Returns:
        the requested bytes that were freed; None: this PyTorch cannot free them.
    """
    free: Callable[[], None] | None = getattr(torch._C, _CLEAR_WORKSPACES, None)
    if free is None:
        return None
    before = torch.cuda.memory_stats(device)["requested_bytes.all.current"]
    free()
    return int(before - torch.cuda.memory_stats(device)["requested_bytes.all.current"])


_NOT_REPORTED = "fsdp_lab: not reported"


def not_reported() -> Any:
    """Return a context whose allocations `allocator_changes` leaves out."""
    return torch.profiler.record_function(_NOT_REPORTED)


class Change(NamedTuple):
    """Something that the profiler saw: an allocation, a free, or the begin of what has a name.

    Attributes:
        name: of what begins; "" for memory.
        device: of the memory; None for what begins.
        num_bytes: negative: they are freed.
    """

    name: str
    device: torch.device | None = None
    address: int = 0
    num_bytes: int = 0


@contextmanager
def allocator_changes(changes: list[Change]) -> Iterator[None]:
    """Append every allocation and free of this thread, and of its backward passes, once the context ends.

    Those inside of `not_reported` are left out.
    """
    from torch.autograd.profiler import profile

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it prints a line for each start and stop
    profiled: Any = profile(profile_memory=True)
    try:
        with profiled:
            yield
    finally:
        left, found = list(profiled.kineto_results.experimental_event_tree()), []
        while left:
            event = left.pop()
            left += () if event.name == _NOT_REPORTED else event.children
            kind, fields = event.typed
            if kind == _EventType.Allocation:
                found.append((event.start_time_ns, Change("", fields.device, fields.ptr, fields.alloc_size)))
            else:
                found.append((event.start_time_ns, Change(event.name)))
        changes += [change for _, change in sorted(found, key=lambda one: one[0])]


def start_allocator_history(max_entries: int) -> None:
    """Let the CUDA allocator record its last `max_entries` allocations and frees, with Python's stacks."""
    torch.cuda.memory._record_memory_history(max_entries=max_entries, stacks="python")


def write_allocator_history(path: Path) -> None:
    """Write the recorded history, for PyTorch's viewer of snapshots."""
    torch.cuda.memory._dump_snapshot(str(path))


def stop_allocator_history() -> None:
    torch.cuda.memory._record_memory_history(enabled=None)


def in_backward() -> bool:
    """Return whether this thread computes a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def storages_of(tensor: Tensor) -> set[torch.UntypedStorage]:
    """Return the storages of a tensor or of its parts; a sparse one has none."""
    try:
        return get_untyped_storages(tensor)
    except NotImplementedError:
        return set()


def finished_work() -> Any:
    return FakeWork().boxed()


def without_modes() -> Any:
    """Return a context in which no dispatch mode is active."""
    return _disable_current_modes()


@contextmanager
def peers_not_asked(device: torch.device) -> Iterator[None]:
    """Let FSDP2 and DDP shard on `device` in a process group whose other ranks do not exist."""
    with (
        # fully_shard asks the mesh for its device, and a mesh knows one CPU only
        mock.patch.object(fsdp_package._fully_shard, _DEVICE_OF_MESH, return_value=device),
        # DDP compares its parameters with those of the other ranks
        mock.patch.object(ddp, _COMPARE_SHAPES, return_value=None),
        # DTensor finds out shapes under a fake mode, by default the one in force, and then the tracker takes
        # the unsharded tensors of that search for real ones
        mock.patch.object(_sharding_prop, "detect_fake_mode", return_value=None),
    ):
        yield


def replace_tensors(model: nn.Module, fresh: Callable[[Tensor], Tensor]) -> None:
    """Replace every parameter and buffer by `fresh(tensor)`, and let FSDP2 know.

    A module that two others hold is visited once: by the second visit its tensor may be fake, and cannot be replaced.
    """
    places, held = [], set()
    for holder in list(model.modules()):
        for name, child in holder._modules.items():
            if child is not None and child in held:
                places.append((holder, name, child))
            held.add(child)
    for holder, name, _ in places:
        holder._modules[name] = None
    try:
        model._apply(fresh)
    finally:
        for holder, name, child in places:
            holder._modules[name] = child


def unsplit_classes(model: nn.Module) -> frozenset[str]:
    """Return the names of the classes that a model does not want divided: transformers' models have such a list."""
    return frozenset(getattr(model, "_no_split_modules", None) or ())


# What is found in a step by its name: collectives, and the ranges that FSDP2 marks for profilers.
ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "c10d._allgather_base_", "c10d._reduce_scatter_base_", "c10d.allreduce_"
FSDP_GATHERS, FSDP_COPIES_OUT = "FSDP::all_gather", "FSDP::all_gather_copy_out"
FSDP_REDUCES = "FSDP::post_backward_reduce"
FSDP_STARTS_PASS, FSDP_ENDS_FORWARD = ("FSDP::pre_forward", "FSDP::pre_backward"), "FSDP::post_forward"


class Ranges:
    """The ranges of FSDP2 that a dispatch mode is in. `innermost` is "" outside of all."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self.innermost = ""

    def see(self, func: Any, args: Sequence[Any]) -> str:
        """Look at an operator, and return the name of the range that it begins; "" if it begins none."""
        begins = func.overloadpacket is torch.ops.profiler._record_function_enter_new
        if begins:
            self._names.append(args[0])
        elif func.overloadpacket is torch.ops.profiler._record_function_exit:
            self._names.pop()
        else:
            return ""
        self.innermost = next((name for name in reversed(self._names) if name.startswith("FSDP::")), "")
        return self._names[-1] if begins else ""


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
    """Return the process group that an operator got, boxed or by its name; None for any other argument."""
    if isinstance(value, str):
        with suppress(RuntimeError, KeyError, ValueError):  # it is the name of something else
            return _resolve_process_group(value)  # type: ignore[arg-type]  # of a type that older ones lack
        return None
    if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
        return dist.ProcessGroup.unbox(value)
    return None


def float8_product(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the product of two float8 matrices whose values are to be multiplied by their scales."""
    return torch._scaled_mm(a, b, a_scale, b_scale, out_dtype=dtype, use_fast_accum=True)
