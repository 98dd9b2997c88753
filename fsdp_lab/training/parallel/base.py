"""What training, forecasts and checkpoints ask of a way to train on several ranks, and what all ways have in common."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from linecache import getline
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from fsdp_lab.config.axes.offload import OffloadTarget
from fsdp_lab.config.axes.precision import Dtype
from fsdp_lab.config.errors import ModelError, UserError
from fsdp_lab.config.target import user_line
from fsdp_lab.config.training import OptimizerImplementation, OptimizerName
from fsdp_lab.config.trial import ShardingConfig, TrialConfig
from fsdp_lab.memory.recorder import StepRecorder
from fsdp_lab.memory.torch_private import GATHER
from fsdp_lab.training.distributed import ParallelDims
from fsdp_lab.training.layout import DividedLayers, Unit
from fsdp_lab.workloads.base import Workload, plain_class
from fsdp_lab.workloads.user.step import parts_of_model

MIXED = "mixed torch.Tensor and DTensor"
_NAMED = 2  # parameters of a unit
# Parts of what PyTorch raises for tensors of several types.
TYPES = ("have the same dtype", "scalar type", "should be the same", "dtypes match", "Found dtype")
_NO_KERNEL = re.compile("(not implemented for '|Unsupported dtype )(B?Float16|Half)")


class Parallel:
    """A model that all ranks train, in one of the ways to do so. Callers do not ask which one it is.

    `divide` is called before the model has its weights, `wrap` after; both before the optimizer is made.

    Args:
        config: of the trial.
        dims: how the ranks divide the work; to divide and wrap a model it needs a mesh.
        device: that computes.
    """

    is_sharded: ClassVar[bool] = False  # ranks have parts of parameters
    fills_on_host: ClassVar[bool] = False  # the whole model gets its weights on the host; `wrap` moves it
    flat_parts: int = 1  # ranks that share the elements of a parameter that is no DTensor
    # For messages about a user's optimizer: why it may fail, why its groups may differ, and the setting that avoids it.
    gives_optimizer: ClassVar[str] = ""
    changes_shapes: ClassVar[str] = ""
    keeps_shapes: ClassVar[str] = "sharding=ddp"
    # The setting with which a loss scaler asks all ranks for overflows. A rank sees only those of its own part.
    # PyTorch's plain scaler asks at most the ranks that share the first parameter.
    asks_all_for: str = ""
    model: nn.Module  # as ranks train it; since `wrap`
    units: list[Unit]  # since `divide`

    def __init__(self, config: TrialConfig, dims: ParallelDims, device: torch.device) -> None:
        self.config, self.dims, self.device = config, dims, device
        self.sharding, self.api = f"sharding={config.sharding.granularity.name}", config.sharding.api_name

    @staticmethod
    def axes(sharding: ShardingConfig, world_size: int) -> dict[str, int]:
        """Return the axes of the ranks' mesh and their sizes, the outermost first; here all have the whole model."""
        return {"dp_replicate": world_size}

    @property
    def home(self) -> torch.device:
        """Where the optimizer finds parameters and gradients: on the host with offload, else on the device."""
        return self.device if self.config.offload.target is OffloadTarget.none else torch.device("cpu")

    def roots(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return what is sharded as a whole, by name: the model, or with `task.step` each of its parts."""
        return {"": model} if self.config.task.step is None else parts_of_model(model)

    def leaves_some_unused(self, workload: Workload, on_meta: nn.Module | None = None) -> tuple[bool, list[str]]:
        """Return whether every step has to look for parameters without a gradient, and notes about that.

        Args:
            on_meta: a copy of the model; None: the constructor is called.
        """
        return False, []

    def check_made(self, model: nn.Module) -> None:
        """Check what a constructor has made, before it is divided.

        Raises:
            ModelError: a parameter or buffer has no size yet, or is divided already; or something else holds a
                parameter that sharding replaces.
        """
        for module in model.modules():
            kind = type(module).__name__
            for leaf, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                if is_lazy(tensor):
                    raise ModelError(
                        f"the model has a {kind}, whose parameters get their size from the first batch, but fsdp_lab "
                        f"shards them before it; use {kind.replace('Lazy', '')} with that size."
                    )
                if isinstance(tensor, DTensor):
                    raise ModelError(
                        f"the parameter {leaf} of {kind} is already a DTensor; fsdp_lab shards parameters itself: make "
                        "it a plain tensor."
                    )

    def divide_layers(self, model: nn.Module, in_tokens: bool) -> DividedLayers | None:
        """Divide the layers of a model among neighbouring ranks, in place; return how, or None if they stay whole.

        Args:
            in_tokens: whether the task's loss is our cross entropy of tokens.

        Raises:
            ModelError: there is no plan that fits the model.
        """
        return None

    def divide(self, model: nn.Module, units: Sequence[nn.Module], last: Sequence[nn.Module]) -> None:
        """Check a model without weights, and shard it in place, unless `wrap` shards it.

        Args:
            units: as `sharding_units` returns them.
            last: as `last_unit` returns them.

        Raises:
            ModelError: with the name of the first parameter that the configuration cannot train, and a remedy.
        """
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for parameter in model.parameters():
            self._check_parameter(parameter, names[id(parameter)])
        self.units = [self.unit([""], model, list(model.named_parameters()))]

    def unit(self, names: Sequence[str], module: nn.Module, named: Sequence[tuple[str, nn.Parameter]]) -> Unit:
        """Describe what is gathered together, before it is sharded.

        Args:
            names: of its modules.
            module: the first of them.
            named: its parameters, without those of inner units.
        """
        parts = {name: local(parameter) for name, parameter in named}
        kept, param_dtype = self.config.precision.param_dtype is Dtype.float32, self.config.precision.param_dtype.value
        stored = dict.fromkeys(type_of(part) for part in parts.values())
        widths = [part.itemsize if kept else getattr(torch, param_dtype).itemsize for part in parts.values()]
        largest = sorted(parts, key=lambda name: -parts[name].numel())[:_NAMED]
        return Unit(
            unit=", ".join(names),
            count=1,
            module=plain_class(module).__name__,
            parameters=sum(part.numel() for part in parts.values()),
            stored="/".join(stored),
            sharded=self.stored_bytes([*parts.values()]),
            dtype="/".join(stored) if kept or not self.is_sharded else param_dtype,
            gathered=sum(p.numel() * w for p, w in zip(parts.values(), widths, strict=True)) * self.is_sharded,
            weights=", ".join(largest),
            trained=sum(part.numel() for part in parts.values() if part.requires_grad),
        )

    def stored_bytes(self, parts: Sequence[Tensor]) -> int:
        """Return the bytes that a rank stores of the parameters of a unit."""
        return sum(part.nbytes for part in parts)

    def _check_parameter(self, parameter: nn.Parameter, name: str) -> None:
        precision, optimizer = self.config.precision, self.config.optimizer
        if parameter.is_complex() and parameter.requires_grad:
            reduced = precision.reduce_dtype is Dtype.float32 and not precision.loss_scaling
            fused = optimizer.implementation is OptimizerImplementation.fused
            stepped = precision.param_dtype is Dtype.float32 and optimizer.name is OptimizerName.sgd
            if fused or not reduced or (self.is_sharded and not stepped):
                raise ModelError(
                    f"the parameter {name} is {type_of(parameter)}: it trains with reductions in float32, no loss "
                    "scaling and no fused optimizer, and under FSDP2 with optimizer=sgd precision=fp32 only; use "
                    "these, or register torch.view_as_real(x), and view it as complex in forward."
                )

    def place(self, model: nn.Module) -> None:
        """Move a divided model with its weights to the device of `fills`."""
        model.to(self.fills[0])

    @property
    def fills(self) -> tuple[torch.device, torch.device]:
        """Where a divided model's parameters get their first values, and its buffers."""
        return (torch.device("cpu"),) * 2 if self.fills_on_host else (self.home, self.device)

    def shard_to_draw(self) -> int:
        """Return the number of this rank's part of the model, if ranks draw their parts by seeds of their own.

        On a GPU PyTorch draws each shard of a DTensor from its place in the whole. On a CPU it does not, so ranks with
        different shards have different seeds, and ranks with copies of a shard the same.

        Raises:
            ModelError: ranks cannot draw parts.
        """
        return 0

    def wrap(self, model: nn.Module, find_unused: bool) -> None:
        """Make a divided model with its weights the one to train.

        Args:
            find_unused: whether some parameters get no gradient.
        """
        self.model = model

    def reduce_in_python(self) -> None:
        """Let a forecast see how gradients are reduced, where PyTorch does so in C++."""

    def divided_loss(self) -> AbstractContextManager[Any]:
        """Return the context of a forward pass, loss and backward pass, in which logits may be divided."""
        return nullcontext()

    def microbatch(self, is_last: bool) -> AbstractContextManager[None]:
        """Return the context of a microbatch's forward pass and loss, before its backward pass.

        The last microbatch of a step exchanges gradients; with `training.sync_each_microbatch` every one does.
        """
        return nullcontext()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Explain what a forward pass raises inside, and let it compute in the precision of the trial."""
        with self.explained(forward=True), self.watched():
            yield

    @contextmanager
    def explained(self, forward: bool) -> Iterator[None]:
        """Raise an error of a `forward` or a backward pass as `explain` words it."""
        try:
            yield
        except (RuntimeError, ValueError, UserError) as error:  # a task may blame the batch for it
            cause = error.__cause__ or error
            why = self._in_16_bits(cause) or self.explain(str(error), cause, forward)
            if why is None:
                raise
            raise why from error

    def explain(self, text: str, cause: BaseException, forward: bool) -> UserError | None:
        """Return an error in a user's words if it comes from how ranks train; else None."""
        return None

    def _in_16_bits(self, cause: BaseException) -> UserError | None:
        precision = self.config.precision
        param_dtype, named = precision.param_dtype, f"{str(cause).rstrip('.')}{at(cause)}"
        if precision.is_narrow and any(words in str(cause) for words in TYPES):
            return ModelError(
                f"precision.storage_dtype={precision.storage_dtype.value}: {named}. The whole model is in this type, "
                "and forward makes another: cast it there, as made.to(x.dtype), or use precision=bf16_mixed."
            )
        if param_dtype is Dtype.float32 or not _NO_KERNEL.search(str(cause)):
            return None
        return ModelError(
            f"precision.param_dtype={param_dtype.value}: {named}. PyTorch does not compute "
            f"this in {param_dtype.value} on this device: do it in float32, as f(x.float()).to(x.dtype), or use "
            "precision=fp32."
        )

    def watched(self) -> AbstractContextManager[None]:
        """Return the context for code that uses the model's parameters; it refuses the use of a part."""
        return nullcontext()

    @contextmanager
    def backward(self, is_last: bool) -> Iterator[None]:
        """Explain what the backward pass of a microbatch raises inside; see `microbatch`."""
        with self.explained(forward=False):
            yield

    def clip(self, max_norm: float | None) -> Tensor:
        """Return the norm of the gradients of all ranks, and scale them down if it exceeds `max_norm`; None: never."""
        alike: dict[Any, list[nn.Parameter]] = {}  # by how they are divided: tensor parallelism has several ways
        for p in self.model.parameters():
            if p.grad is not None:
                alike.setdefault((p.device_mesh, p.placements) if isinstance(p, DTensor) else None, []).append(p)
        # `foreach`: one call for all; PyTorch would not choose it for sharded gradients and fake tensors
        gradients = [[p.grad for p in some if p.grad is not None] for some in alike.values()] or [[]]
        norms = [whole(nn.utils.get_total_norm(some, foreach=True)) for some in gradients]
        norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
        for some in alike.values():
            if max_norm is not None:
                nn.utils.clip_grads_with_norm_(some, max_norm, norm, foreach=True)
        return norm

    def check_gradients(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Raise a UserError if ranks that share samples have other gradients of what is not divided among them."""

    def sent(self, func: Any, output: Any, given: Any, seen: StepRecorder) -> Iterator[tuple[Any, str]]:
        """Yield each tensor that a collective of a recorded step gathers or scatters, with its category."""
        yield (output, "all_gather") if func is GATHER else (given, "reduce_scatter")

    def made_for(self, func: Any, args: Any, kwargs: dict[str, Any], seen: StepRecorder) -> str:
        """Return the category of an operator's results in a recorded step; "": this way has none for it."""
        return ""

    def reshard(self) -> None:
        """Free what an evaluation has left gathered, so that the next pass gathers it again."""

    def scaler(self) -> torch.amp.GradScaler:
        """Return the dynamic loss scaler for float16; a disabled one passes everything through.

        It is on the device of the gradients: GradScaler copies its tensors there without waiting, and a CPU would read
        them before they arrive.
        """
        precision = self.config.precision
        scaler = (ShardedGradScaler if self.asks_all_for else torch.amp.GradScaler)(
            self.home.type,
            init_scale=precision.init_scale,
            growth_interval=precision.growth_interval,
            enabled=precision.loss_scaling,
        )
        scaler.scale(torch.zeros((), device=self.home))  # the first scaled tensor decides the device of the scale
        return scaler


def at(error: BaseException) -> str:
    """Return the user's line that raised an error, with its text; "" if none did."""
    file, _, number = user_line(error).rpartition(":")
    return f" ({file}:{number}: {getline(str(Path(file).resolve()), int(number)).strip()})" if file else ""


def type_of(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor that ranks have divided."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
