"""The private names of PyTorch that training uses, under names of our own.

`tests/training/test_units.py` tries each of `NAMES` and names the missing one. If PyTorch lacks a name that this module
imports or reads, the import fails.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import FakeWork
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._tools.common_utils import get_untyped_storages
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, _common_utils, _runtime_utils
from torch.distributed.fsdp import _fully_shard as fsdp_package
from torch.distributed.fsdp._common_utils import HandleTrainingState, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import debug
from torch.utils._python_dispatch import TorchDispatchMode as _DispatchMode
from torch.utils._python_dispatch import _disable_current_modes

from fsdp_lab.machine.private import Name
from fsdp_lab.workloads.base import original_name

__all__ = ["FakeTensorMode", "TorchDispatchMode", "active_fake_mode"]

# Before 2.15 FSDP2 copied every list and dictionary passed to a unit; since then only those with gradients.
REBUILDS_INPUTS = not hasattr(_common_utils, "replace_grad_tensors")

_FSDP = "torch.distributed.fsdp._fully_shard._fully_shard"
_FSDP_STATE = "torch.distributed.fsdp._fully_shard._fsdp_state"
_FSDP_COLLECTIVES = "torch.distributed.fsdp._fully_shard._fsdp_collectives"

NAMES = (
    # of training
    Name(_FSDP, "_get_post_forward_mesh_info", ("reshard_after_forward", "mesh_info")),
    Name("torch.cuda.memory", "_record_memory_history", ("enabled", "max_entries", "stacks")),
    Name("torch.cuda.memory", "_dump_snapshot", ("filename",)),
    Name(f"{_FSDP_COLLECTIVES}", "DefaultAllGather.allocate", ("size", "dtype", "device")),
    Name(f"{_FSDP_COLLECTIVES}", "DefaultReduceScatter.allocate", ("size", "dtype", "device")),
    Name("torch.distributed.fsdp", "ShardingStrategy._HYBRID_SHARD_ZERO2"),
    Name("torch.distributed.fsdp", "MixedPrecision._module_classes_to_ignore"),
    # of a step that is followed
    Name(_FSDP_STATE, "FSDPState._pre_backward", ("grad",)),
    Name(_FSDP, "FSDPModule._get_fsdp_state", ()),
    Name(
        "torch.distributed.fsdp._flat_param", "FlatParamHandle._all_gather_flat_param", ("padded_unsharded_flat_param",)
    ),
    Name("torch.distributed.fsdp._runtime_utils", "_reshard", ("state", "handle", "free_unsharded_flat_param")),
    Name("torch.distributed.fsdp._flat_param", "FlatParamHandle.needs_unshard", ()),
    Name("torch.distributed.fsdp._flat_param", "FlatParamHandle.uses_sharded_strategy"),
    Name("torch", "Tensor._base"),
    Name("torch._C", "_current_graph_task_id"),
    Name("torch.distributed._tools.common_utils", "get_untyped_storages", ("t",)),
    Name("torch", "Tensor._use_count"),
    Name("torch", "Tensor._version"),
    Name("torch", "Tensor._backward_hooks"),
    Name("torch", "Tensor._post_accumulate_grad_hooks"),
    Name("torch._C", "_storage_Use_Count"),
    Name("torch._C._distributed_c10d", "FakeWork.boxed"),
    Name("torch.utils._python_dispatch", "TorchDispatchMode.ignore_compile_internals", ()),
    Name("torch.distributed.tensor.debug", "_clear_sharding_prop_cache", ()),
    Name("torch", "_foreach_norm"),
    Name("torch.nn", "Module._apply", ("fn",)),
    Name("torch.nn", "Module._compiled_call_impl"),
)

GATHER, SCATTER = torch.ops.c10d._allgather_base_.default, torch.ops.c10d._reduce_scatter_base_.default  # output, input
FLAT_GATHER = torch.ops.c10d.allgather_.default  # FSDP1's, for tensors on a CPU
ITEM = torch.ops.aten._local_scalar_dense.default
CAST = torch.ops.aten._to_copy.default
FUNCTIONAL_COLLECTIVES = (
    torch.ops._c10d_functional.all_reduce.default,
    torch.ops._c10d_functional.all_gather_into_tensor.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
)
wait_for_functional = torch.ops._c10d_functional.wait_tensor
DEVICE = torch.ops.prim.device.default  # C++ asks a fake tensor for its device: two of three operators of a fake step


class TorchDispatchMode(_DispatchMode):
    """A mode under which code that is to be compiled runs eagerly, except inside of `compiled_code_runs`.

    There the mode sees the operators that compiled code calls.
    """

    _compiled = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return whether compiled code may run under this mode. PyTorch calls it."""
        return TorchDispatchMode._compiled


@contextmanager
def compiled_code_runs() -> Iterator[None]:
    """Allow code to be compiled, and to run compiled, under our modes that are entered inside."""
    with mock.patch.object(TorchDispatchMode, "_compiled", True):
        yield


@contextmanager
def around_compiled(
    modules: Iterable[nn.Module], begins: Callable[..., None], ends: Callable[..., None]
) -> Iterator[None]:
    """Call `begins(module, args)` before and `ends(module, args, output)` after each compiled module inside.

    Global hooks cannot do this: they are compiled with the module.
    """

    def call(module: nn.Module, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        begins(module, args)
        output = compiled(*args, **kwargs)
        ends(module, args, output)
        return output

    with ExitStack() as patched:
        for module in modules:
            if (compiled := module._compiled_call_impl) is not None:
                calls = partial(call, module, compiled)
                patched.enter_context(mock.patch.object(module, "_compiled_call_impl", calls))
        yield


def flat_units(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the name and the handle of each FSDP1 unit with parameters, the root first."""
    named = ((name, module) for name, module in model.named_modules() if isinstance(module, FullyShardedDataParallel))
    return [(original_name(name), unit._handle) for name, unit in named if unit._handle is not None]


def reshard_flat(model: nn.Module) -> None:
    """Free the parameters that an evaluation left gathered in FSDP1's units, so that the next pass gathers them."""
    for module in model.modules():
        handle: Any = module._handle if isinstance(module, FullyShardedDataParallel) else None
        if handle is not None and handle.uses_sharded_strategy and hasattr(handle.flat_param, "_full_param_padded"):
            if not handle.needs_unshard():
                _runtime_utils._reshard(module, handle, True)
            # a gradient inside of an evaluation starts a backward pass that does not end
            handle._prefetched, handle._training_state = False, HandleTrainingState.IDLE
            module.training_state = TrainingState.IDLE  # type: ignore[assignment]


def _units_of(model: nn.Module) -> list[Any]:
    """Return FSDP2's state of each unit, in the order of its modules."""
    states = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
    return list({id(state): state for state in states}.values())


def collectives_announced(model: nn.Module, comes: Callable[[str, str], None]) -> int:
    """Call `comes(text, names)` before a unit gathers or reduces; `names` are those of the unit's modules.

    Return the number of units. The root has no name. FSDP2's reduction is announced twice: for its input and for its
    output.
    """

    def announcing(base: Any, does: str, unit: str) -> Any:
        class Announcing(base):  # type: ignore[misc]
            def allocate(self, size: Sequence[int], **kwargs: Any) -> Tensor:
                comes(does.format(size=size[0]), unit)
                return super().allocate(size, **kwargs)  # type: ignore[no-any-return]

        return Announcing()

    flat = flat_units(model)
    for name, handle in flat:
        _announce_flat(name, handle, comes)
    names = {module: name for name, module in model.named_modules()}
    units = _units_of(model)
    for state in units:
        unit = ", ".join(original_name(names[module]) for module in state._modules)
        module = state._modules[0]
        module.set_custom_all_gather(announcing(DefaultAllGather, "gathers the weights", unit))
        module.set_custom_reduce_scatter(announcing(DefaultReduceScatter, "reduces {size} gradients", unit))
    return len(units) + len(flat)


def _announce_flat(unit: str, handle: Any, comes: Callable[[str, str], None]) -> None:
    """Announce the collectives of one of FSDP1's units; see `collectives_announced`."""
    gather = handle._all_gather_flat_param

    def announced(whole: Tensor) -> Tensor:
        comes("gathers the weights", unit)
        return gather(whole)  # type: ignore[no-any-return]

    handle._all_gather_flat_param = announced
    if handle.flat_param.requires_grad:
        handle.flat_param.register_post_accumulate_grad_hook(lambda _: comes("has the gradients", unit))


def unsharded_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter, nn.Parameter]]:
    """Return each parameter that has been gathered: its name, its shard, and the copy, whose memory may be free."""
    groups = [group for state in _units_of(model) if (group := state._fsdp_param_group) is not None]
    parameters = [parameter for group in groups for parameter in group.fsdp_params]
    return [
        (p._param_fqn or "", p.sharded_param, p._unsharded_param) for p in parameters if hasattr(p, "_unsharded_param")
    ]


def flat_parameters(model: nn.Module) -> dict[int, str]:
    """Return the name of each FSDP1 parameter by its number.

    Units compute with other tensors. These hold a rank's part; with one rank they share the memory of the unit's
    tensors.
    """
    return {
        id(parameter): f"{unit}.{original_name(name)}".removeprefix(".")
        for unit, handle in flat_units(model)
        for name, parameter in zip(handle.flat_param._fqns, handle.flat_param._params, strict=True)
    }


Place = tuple[nn.Module, str, Callable[[], Sequence[Any]]]  # a module, a parameter's name, and what FSDP puts there


def places_of_parameters(model: nn.Module, inside: bool) -> Iterator[tuple[nn.Module, list[Place]]]:
    """Yield each module that FSDP gives gathered parameters when it is called, and the places of these parameters.

    FSDP2 puts them there when a unit is called. FSDP1 does, too; the modules inside its unit then use them, whatever is
    registered as their parameters. `inside`: also yield those modules.
    """
    forms = ("sharded_param", "_unsharded_param", "_sharded_post_forward_param")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            group = module._get_fsdp_state()._fsdp_param_group
            places = list[Place]()
            for p in group.fsdp_params if group is not None else ():
                info, known = p._module_info, partial(lambda p: [getattr(p, form, None) for form in forms], p)
                tied = zip(info.shared_modules, info.shared_param_names, strict=True)
                places += [(*place, known) for place in ((info.module, info.param_name), *tied)]
            yield module, places
        elif isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            flat: Any = module._handle.flat_param
            of_module: dict[nn.Module, list[Place]] = {}
            for i, (name, holder, _) in enumerate(flat._param_infos):
                of_module.setdefault(holder, []).append((holder, name, partial(_of_flat, flat, i)))
            if inside:
                yield from of_module.items()
            own: list[Place] = [(module, name, lambda: (None,)) for _, name, _ in of_module.get(module.module, ())]
            yield module, [*own, *(place for places in of_module.values() for place in places)]


def _of_flat(flat: Any, i: int) -> Sequence[Any]:
    return flat._params[i], flat._tensors[i]


def has_own_parameter(place: Place) -> bool:
    """Return whether a module still has the parameter that FSDP put there."""
    module, name, known = place
    now = module._parameters.get(name, vars(module).get(name))
    return any(now is each for each in known())


class AccumulatesInPlace(TorchDispatchMode):
    """Adds the gradients of a tensor that is used more than once in place, as PyTorch does without a mode.

    PyTorch's autograd engine adds the second gradient to the first one in place if nothing else holds the first. Under
    any dispatch mode it makes a third tensor instead, so a recorded step would hold more than an ordinary one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._alone: set[tuple[int, int]] = set()  # the reference count of a gradient that only the engine holds
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


def has_hooks(parameter: nn.Parameter) -> bool:
    """Return whether a parameter has hooks on its gradient."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def norms_of(tensors: list[Tensor]) -> Sequence[Tensor]:
    """Return the norm of each tensor with few kernels."""
    return torch._foreach_norm(tensors)


def version_of(tensor: Tensor) -> int:
    """Return the number of in-place writes of a tensor; some kernels do not count theirs."""
    return tensor._version


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is dense and of no subclass, except for a fake tensor."""
    return (type(tensor) is Tensor or isinstance(tensor, FakeTensor)) and tensor.layout is torch.strided


def _alike(first: Tensor, second: Tensor) -> bool:
    return is_plain(first) and is_plain(second) and first.shape == second.shape and first.dtype is second.dtype


def _has_storage_alone(tensor: Tensor) -> bool:
    """Return whether a tensor fills its storage and is the only tensor in it."""
    storage = tensor.untyped_storage()
    holders = torch._C._storage_Use_Count(storage._cdata) - 1  # without the reference of the question itself
    return holders == 1 and storage.nbytes() == tensor.numel() * tensor.element_size()


_TORCH = str(Path(torch.__file__).parent)  # wraps the methods of modes


def _of_the_engine() -> bool:
    """Return whether the autograd engine itself calls an operator, not a Python function."""
    frame: FrameType | None = sys._getframe(2)
    while frame and frame.f_code.co_name in ("_fn", "inner") and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    return frame is None or frame.f_code.co_name == "_engine_run_backward"


@contextmanager
def one_post_forward_mesh() -> Iterator[None]:
    """Let every `fully_shard` call inside that reshards to a smaller mesh use the same mesh.

    PyTorch makes a mesh for each call, with its own process groups and communicators: about 150 for the 25 units of a
    ViT-L/16 on 8 workers.
    """
    make = fsdp_package._fully_shard._get_post_forward_mesh_info
    made: dict[int, Any] = {}

    def make_once(reshard_after_forward: Any, mesh_info: Any) -> Any:
        if isinstance(reshard_after_forward, bool) or reshard_after_forward not in made:
            made[reshard_after_forward] = make(reshard_after_forward, mesh_info)
        return made[reshard_after_forward]

    with mock.patch.object(fsdp_package._fully_shard, "_get_post_forward_mesh_info", make_once):
        yield


def gather_before_gradient_of(tensor: Tensor, unit: nn.Module) -> None:
    """Let the backward pass gather the parameters of a sharded unit before the gradient of a tensor is used.

    A view that is changed in place loses this, so its base gets it, too.
    """
    assert isinstance(unit, FSDPModule)
    for told in (tensor, tensor._base):
        if told is not None and told.requires_grad and told.grad_fn is not None:
            told.register_hook(unit._get_fsdp_state()._pre_backward)


def free_cublas_workspaces(device: torch.device) -> int:
    """Free cuBLAS's workspaces, and return their bytes; the next matrix product allocates them again."""
    before = torch.cuda.memory_stats(device)["requested_bytes.all.current"]
    torch._C._cuda_clearCublasWorkspaces()
    return int(before - torch.cuda.memory_stats(device)["requested_bytes.all.current"])


def start_allocator_history(max_entries: int) -> None:
    """Make the CUDA allocator record its last `max_entries` allocations and frees, with Python stacks."""
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


def forget_meshes() -> None:
    """Clear DTensor's caches of a process group that has ended.

    They are keyed by mesh. The mesh of a later group with the same ranks is equal, though its groups have other names.
    """
    debug._clear_sharding_prop_cache()


def without_modes() -> Any:
    """Return a context in which no dispatch mode is active."""
    return _disable_current_modes()


def replace_tensors(model: nn.Module, fresh: Callable[[Tensor], Tensor], in_place: bool = True) -> None:
    """Replace every parameter and buffer by `fresh(tensor)`, and let FSDP2 know.

    Args:
        in_place: all references to a parameter get the new one. A fake tensor cannot be put in place.

    A module with two parents is visited once: at a second visit its tensor may be fake, and cannot be replaced.
    """
    places, held = [], set()
    for holder in list(model.modules()):
        for name, child in holder._modules.items():
            if child is not None and child in held:
                places.append((holder, name, child))
            held.add(child)
    for holder, name, _ in places:
        holder._modules[name] = None
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(in_place)
    try:
        model._apply(fresh)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
        for holder, name, child in places:
            holder._modules[name] = child


def unsplit_classes(model: nn.Module) -> frozenset[str]:
    """Return the names of the classes that must not be divided: transformers' models have such a list."""
    return frozenset(getattr(model, "_no_split_modules", None) or ())


def wait_for(tensor: Any) -> Any:
    """Wait for a tensor that a collective fills and return it; return anything else as it is."""
    return wait_for_functional(tensor) if isinstance(tensor, AsyncCollectiveTensor) else tensor


def own_plan(model: nn.Module) -> Mapping[str, str]:
    """Return a model's own tensor-parallel plan; empty: it has none."""
    return getattr(model, "_tp_plan", None) or {}


# The ranges that FSDP2 marks for profilers.
FSDP_GATHERS, FSDP_COPIES_OUT = "FSDP::all_gather", "FSDP::all_gather_copy_out"
FSDP_REDUCES = "FSDP::post_backward_reduce"
FSDP_STARTS_PASS, FSDP_ENDS_FORWARD = ("FSDP::pre_forward", "FSDP::pre_backward"), "FSDP::post_forward"


class Ranges:
    """The ranges of FSDP2 that a dispatch mode is in. `innermost` is "" outside of all."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self.innermost = ""

    def see(self, func: Any, args: Sequence[Any]) -> str:
        """Follow an operator, and return the name of the range that it starts; "" if it starts none."""
        begins = func.overloadpacket is torch.ops.profiler._record_function_enter_new
        if begins:
            self._names.append(args[0])
        elif func.overloadpacket is torch.ops.profiler._record_function_exit:
            self._names.pop()
        else:
            return ""
        self.innermost = next((name for name in reversed(self._names) if name.startswith("FSDP::")), "")
        return self._names[-1] if begins else ""
