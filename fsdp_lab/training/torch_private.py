"""Every private name of PyTorch that is used, under names of our own.

`tests/training/test_torch_private.py` tries each of `NAMES` and names the missing one. Without a name in `OPTIONAL`
something costs more, as its function says. Without any other, this module or the code that needs the name fails.
"""

from __future__ import annotations

import copy
import os
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from traceback import walk_tb
from types import FrameType, SimpleNamespace
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
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed._tools import mem_tracker, mod_tracker
from torch.distributed._tools.common_utils import get_untyped_storages
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker, _FSDPRefType
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.fsdp import FSDPModule, _common_utils
from torch.distributed.fsdp import _fully_shard as fsdp_package
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_state import _register_group_forward_hooks
from torch.distributed.tensor import DTensor, _sharding_prop
from torch.nn.parallel import distributed as ddp
from torch.utils import weak
from torch.utils._python_dispatch import TorchDispatchMode as _DispatchMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from fsdp_lab.machine.private import Name

__all__ = [
    "DataDependentOutputException", "DynamicOutputShapeException", "FakeTensorMode", "TorchDispatchMode",
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
_TRACKER = "torch.distributed._tools.mem_tracker"
_FSDP_TRACKER = "torch.distributed._tools.fsdp2_mem_tracker"

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
    Name(_TRACKER, "MemTracker._update_snap", ("u_type", "winfo")),
    Name(_TRACKER, "MemTracker._update_peak_stats", ("peak_state",)),
    Name(_TRACKER, "MemTracker._pre_fw_hook", ("module", "inputs")),
    Name(_TRACKER, "MemTracker._track_module_params_and_buffers", ("module", "install_grad_hooks")),
    Name(_TRACKER, "MemTracker._update_and_maybe_create_winfos", ("t", "reftype")),
    Name(_TRACKER, "_MemRefType.OTH"),
    Name("torch", "_disable_dynamo", ("fn",)),
    Name(_FSDP_TRACKER, "FSDPMemTracker._fsdp_state_pre_forward", ("fsdp_mod", "orig_fsdp_state_pre_fw")),
    Name(
        _FSDP_TRACKER,
        "FSDPMemTracker._fsdp_param_group_post_backward",
        ("fsdp_mod", "orig_fsdp_param_group_post_backward"),
    ),
    Name(_FSDP_TRACKER, "_FSDPRefType.INP"),
    Name(_FSDP_TRACKER, "FSDPMemTracker._instrument_fsdp_module", ()),
    Name(_FSDP_TRACKER, "FSDPMemTracker._deregister_module_and_optimizer_hooks", ()),
    Name(_FSDP_TRACKER, "FSDPMemTracker._fsdp_state_post_forward", ("fsdp_mod", "orig_fsdp_state_post_fw")),
    Name(_FSDP_STATE, "_register_group_forward_hooks", ("modules", "pre_hook", "post_hook", "modules_to_run")),
    Name(_FSDP_STATE, "FSDPState._pre_forward"),
    Name(_FSDP_STATE, "FSDPState._post_forward"),
    Name(_FSDP_STATE, "FSDPState._pre_backward", ("grad",)),
    Name(_FSDP, "FSDPModule._get_fsdp_state", ()),
    Name("torch", "Tensor._base"),
    Name("torch.distributed._tools.mod_tracker", "register_multi_grad_hook"),
    Name("torch.distributed._tools.mod_tracker", "ModTracker._maybe_set_engine_callback", ()),
    Name(_TRACKER, "get_untyped_storages", ("t",)),
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

# One tensor out, one in.
GATHERS_AND_SCATTERS = (torch.ops.c10d._allgather_base_.default, torch.ops.c10d._reduce_scatter_base_.default)
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


def collectives_announced(model: nn.Module, comes: Callable[[str, str, int], None]) -> list[str]:
    """Call `comes` before a unit gathers or reduces; return the names of all units.

    Args:
        comes: called with `gather` or `reduce`, the unit's name, and the number of elements: of a reduction once for
            what goes in, and once for what comes out.
    """

    def announcing(base: Any, what: str, unit: str) -> Any:
        class Announcing(base):  # type: ignore[misc]
            def allocate(self, size: Sequence[int], **kwargs: Any) -> Tensor:
                comes(what, unit, size[0])
                return super().allocate(size, **kwargs)  # type: ignore[no-any-return]

        return Announcing()

    names = {module: name for name, module in model.named_modules()}
    units = []
    for state in _units_of(model):
        units.append(", ".join(names[module] or "the root" for module in state._modules))
        if (group := state._fsdp_param_group) is not None:
            group._all_gather_comm = announcing(DefaultAllGather, "gather", units[-1])
            group._reduce_scatter_comm = announcing(DefaultReduceScatter, "reduce", units[-1])
    return units


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


# Both trackers' categories -> ours. "Other" is the batch, which DDP's tracker is given from outside.
CATEGORY_OF = {
    "Sharded Param": "param",
    "Parameter": "param",
    "Unsharded Param": "unsharded_param",
    "Sharded Grad": "grad",
    "Gradient": "grad",
    "Unsharded Grad": "unsharded_grad",
    "OptState": "optimizer",
    "Optstate": "optimizer",
    "Activation": "activation",
    "All Gather": "all_gather",
    "Reduce Scatter": "reduce_scatter",
    "Temp": "temp",
    "Buffer": "buffer",
    "Inputs": "input",
    "Other": "input",
}


def _no_handle() -> RemovableHandle:
    return RemovableHandle(OrderedDict())


class Tracker(MemTracker):
    """PyTorch's tracker of storages. It reports each change to a subclass by `changed`."""

    ignore_compile_internals = TorchDispatchMode.ignore_compile_internals

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._fake_mode = active_fake_mode()

    def changed(self, storage: int, freed: bool, device: torch.device, category: str, num_bytes: int) -> None:
        """Handle a storage that was created, was freed, or changed its size or category.

        Args:
            storage: its number, which is used again once it is freed.
            category: one of `profile.CATEGORIES`.
            num_bytes: the bytes that were requested; 0 once freed.
        """
        raise NotImplementedError

    def modules_at_work(self) -> set[str]:
        """Return the full names of the modules that have been entered and not left, the model's own class first."""
        return self._mod_tracker.parents - {"Global"}

    def in_backward(self) -> bool:
        return self._mod_tracker.is_bw

    def in_optimizer(self) -> bool:
        return self._in_opt

    def follow(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            self._update_and_maybe_create_winfos(tensor, _MemRefType.OTH)

    def _update_and_maybe_create_winfos(self, t: Tensor, *args: Any, **kwargs: Any) -> set[Any]:
        return super()._update_and_maybe_create_winfos(t, *args, **kwargs) if t.layout is torch.strided else set()

    def begins_forward(self, module: nn.Module) -> bool:
        """Return whether a forward pass begins.

        The base class lets each forward pass call every module once, so it refuses the second microbatch of an
        accumulation. Its statistics of modules are not needed here and are reset.
        """
        return not self.modules_at_work() - {self._mod_tracker.get_known_fqn(module)} and not self.in_backward()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is DEVICE:  # no change of memory, and the modes below need not hear of it
            return args[0].device
        # DTensor tries an operation out on fake tensors of the whole shape first: they hold nothing.
        # PyTorch 2.11 counts them. A DTensor itself the base class sends back, to come again as its parts.
        if active_fake_mode() is not self._fake_mode and DTensor not in types:
            return func(*args, **(kwargs or {}))
        if self._makes_bucket(func, kwargs or {}):
            bucket = func(*args, **(kwargs or {}))
            self._update_and_maybe_create_winfos(bucket, _MemRefType.GRAD)
            return bucket
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _makes_bucket(self, func: Any, kwargs: dict[str, Any]) -> bool:
        """Return whether DDP makes one of the buckets that gradients are views of.

        It makes them itself, before its module is entered, and its whole numbers are no buckets. The base class takes a
        bucket for an activation.
        """
        return (
            func is torch.ops.aten.empty.memory_format
            and getattr(kwargs.get("dtype"), "is_floating_point", True)
            and self.modules_at_work() == {ddp.DistributedDataParallel.__name__}
            and not self.in_backward()
        )

    def _update_snap(self, u_type: Any, winfo: Any, *args: Any, **kwargs: Any) -> None:
        winfo.mem_consumed = winfo.size * winfo.element_size  # as requested: the base class rounds it up on CUDA
        super()._update_snap(u_type, winfo, *args, **kwargs)
        freed = u_type.name == "DEL"
        category = CATEGORY_OF[winfo.reftype.value]
        self.changed(id(winfo), freed, winfo.device, category, 0 if freed else winfo.mem_consumed)

    def _update_peak_stats(self, peak_state: Any) -> None:
        """Do nothing: the recorder finds the peak in the changes, and peaks of modules are not needed."""

    def _track_module_params_and_buffers(self, module: nn.Module, install_grad_hooks: bool = True) -> tuple[int, int]:
        for parameter in module.parameters():
            if not parameter.requires_grad:  # the base class would hook its gradient, which PyTorch refuses
                self._param_to_grad_hook_handles[parameter] = (_no_handle(), _no_handle())
        return super()._track_module_params_and_buffers(module, install_grad_hooks)

    @torch._disable_dynamo
    def _pre_fw_hook(self, module: nn.Module, inputs: Any) -> None:
        if self.begins_forward(module):
            self.reset_mod_stats()
        super()._pre_fw_hook(module, inputs)


class FsdpTracker(Tracker, FSDPMemTracker):
    """The tracker of a model that `fully_shard` was applied to.

    The base class takes each module of a unit for a unit. It sees only the first module of several, whose hooks then go
    to all of them, as PyTorch's do.
    """

    def _instrument_fsdp_module(self) -> None:
        whole, others = self._root_mod, {id(other) for state in self._shared_units() for other in state._modules[1:]}
        seen = [module for module in whole.modules() if id(module) not in others]
        self._root_mod = SimpleNamespace(modules=lambda: seen, buffers=whole.buffers)  # type: ignore[assignment]
        try:
            super()._instrument_fsdp_module()
        finally:
            self._root_mod = whole
        for state in self._shared_units():
            first = state._modules[0]
            before = self._fsdp_state_pre_forward(first, state._pre_forward)
            after = self._fsdp_state_post_forward(first, state._post_forward)
            _hook_together(state, before, after)

    def _deregister_module_and_optimizer_hooks(self) -> None:
        super()._deregister_module_and_optimizer_hooks()
        for state in self._shared_units():
            _hook_together(state, state._pre_forward, state._post_forward)

    def _shared_units(self) -> list[Any]:
        states = {
            id(s): s for m in self._root_mod.modules() if isinstance(m, FSDPModule) and (s := m._get_fsdp_state())
        }
        return [state for state in states.values() if len(state._modules) > 1]

    def follow(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            self._update_and_maybe_create_winfos(tensor, _FSDPRefType.INP)

    def _fsdp_state_pre_forward(self, fsdp_mod: Any, orig_fsdp_state_pre_fw: Any) -> Any:
        inner = super()._fsdp_state_pre_forward(fsdp_mod, orig_fsdp_state_pre_fw)

        def fresh_at_root(*args: Any, **kwargs: Any) -> Any:
            if self.begins_forward(fsdp_mod):
                self.reset_mod_stats()
            return inner(*args, **kwargs)

        return torch._disable_dynamo(fresh_at_root)

    def _fsdp_param_group_post_backward(self, fsdp_mod: Any, orig_fsdp_param_group_post_backward: Any) -> Any:
        inner = super()._fsdp_param_group_post_backward(fsdp_mod, orig_fsdp_param_group_post_backward)

        def where_called(*args: Any, **kwargs: Any) -> Any:
            if fsdp_mod in self.memory_tracking:
                return inner(*args, **kwargs)
            return orig_fsdp_param_group_post_backward(*args, **kwargs)  # the tracker fails on a unit without a forward

        return torch._disable_dynamo(where_called)


def _hook_together(state: Any, before: Callable[..., Any], after: Callable[..., Any]) -> None:
    """Let a unit's modules call `before` when the first begins and `after` when the last ends.

    These replace the hooks of its first module.
    """
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    more = {"cast_output_dtype": state._cast_output_dtype} if hasattr(state, "_cast_output_dtype") else {}
    handle = _register_group_forward_hooks(state._modules, before, after, state._modules_to_run_forward, **more)
    state._pre_forward_hook_handle = state._post_forward_hook_handle = handle


@contextmanager
def tracker_hooks_removed() -> Iterator[None]:
    """Remove the hooks that PyTorch's tracker of modules leaves on the graph.

    They would keep the whole model alive for good: Python's collector does not see cycles that go through C++. Inside,
    the tracker also follows `torch.autograd.grad` in a forward pass, and passes over sparse tensors.
    """
    handles = []

    def register(tensors: Sequence[Tensor], fn: Any, *, mode: Any = "all") -> Any:
        if any(tensor.is_leaf for tensor in tensors):  # whose gradients PyTorch cannot count inside of autograd.grad
            mode = "any"
        handles.append(register_multi_grad_hook(tensors, fn, mode=mode))
        return handles[-1]

    enqueue = mod_tracker.ModTracker._maybe_set_engine_callback

    def keep_open(tracker: Any) -> None:
        is_first, opened = not tracker._has_callback, tracker.parents - {"Global"}
        enqueue(tracker)
        if is_first and opened:  # the base class closes all modules at the end, also those whose forward pass goes on
            counts = {name: tracker._active_module_cnt[name] for name in opened}

            def reopen() -> None:
                tracker.parents |= opened
                tracker._active_module_cnt.update(counts)

            torch.autograd.Variable._execution_engine.queue_callback(reopen)

    def storages(tensor: Tensor) -> set[torch.UntypedStorage]:
        try:
            return get_untyped_storages(tensor)
        except NotImplementedError:
            return set()

    with (
        mock.patch.object(mod_tracker, "register_multi_grad_hook", torch._disable_dynamo(register)),
        mock.patch.object(mod_tracker.ModTracker, "_maybe_set_engine_callback", keep_open),
        mock.patch.object(mem_tracker, "get_untyped_storages", storages),
    ):
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def is_of_tracker(error: Exception) -> bool:
    """Return whether PyTorch's tracker itself raised an error, and not the step that it follows."""
    codes = [frame.f_code for frame, _ in walk_tb(error.__traceback__)]
    while codes and codes[-1].co_filename in (copy.__file__, weak.__file__):  # which it calls
        codes.pop()
    innermost = codes[-1] if codes else None
    return (
        innermost is not None
        and Path(innermost.co_filename).parent == Path(mem_tracker.__file__).parent
        and innermost.co_name != "resize_"  # it allocates
    )


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


# What a trace finds in a step by its name: collectives, and the ranges that FSDP2 marks for profilers. Without a mark
# its copies would count as computing.
ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "c10d._allgather_base_", "c10d._reduce_scatter_base_", "c10d.allreduce_"
RANGE_ENTERS, RANGE_LEAVES = "profiler._record_function_enter_new", "profiler._record_function_exit"
FSDP_GATHERS, FSDP_COPIES_OUT = "FSDP::all_gather", "FSDP::all_gather_copy_out"
FSDP_REDUCES = "FSDP::post_backward_reduce"


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
