"""What training, forecasts and checkpoints ask of a way to train on several ranks, and what all ways have in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from fsdp_lab.config.errors import ModelError, UserError
from fsdp_lab.config.parallel import Dtype, OffloadTarget, ShardingConfig
from fsdp_lab.config.training import OptimizerImplementation, OptimizerName
from fsdp_lab.config.trial import TrialConfig
from fsdp_lab.training.distributed import ParallelDims
from fsdp_lab.training.explain import in_16_bits
from fsdp_lab.training.layout import DividedLayers
from fsdp_lab.training.torch_private import GATHER
from fsdp_lab.workloads.base import Workload


class Seen(Protocol):
    """What a recorder has seen of a step."""

    def known_as(self, tensor: Any) -> str:
        """Return what a tensor is for; "" if that is not known."""

    def at_work(self) -> list[str]:
        """Return the names of the modules that are at work, the innermost last."""


class Parallel:
    """A model that all ranks train, in one of the ways to do so. Nobody asks which one it is.

    `divide` comes before the model has its weights and `wrap` after, both before the optimizer is made.

    Args:
        config: of the trial.
        dims: how the ranks divide the work; to divide and wrap a model it needs a mesh.
        device: that computes.

    Attributes:
        is_sharded: whether ranks have parts of parameters.
        asks_all: the setting for which the loss scaler asks all ranks for overflows, since a rank sees those of its own
            part, and PyTorch's plain one asks at most those that share the first parameter; "": none.
        gives_optimizer, changes_shapes, keeps_shapes: for messages about an own optimizer: what may have made it fail;
            why it groups otherwise; the setting with which it does not.
        sharding, api: the setting and PyTorch's way to shard, for messages.
        flat_parts: over how many ranks the elements of a parameter are spread that is no DTensor.
        fills_on_host: whether the whole model gets its weights on the host, from where `wrap` takes it.
        model: as ranks train it; since `wrap`.
    """

    is_sharded: ClassVar[bool] = False
    gives_optimizer: ClassVar[str] = ""
    changes_shapes: ClassVar[str] = ""
    keeps_shapes: ClassVar[str] = "sharding=ddp"
    asks_all: str = ""
    fills_on_host: ClassVar[bool] = False
    flat_parts: int = 1
    model: nn.Module

    def __init__(self, config: TrialConfig, dims: ParallelDims, device: torch.device) -> None:
        self.config, self.dims, self.device = config, dims, device
        self.sharding, self.api = f"sharding={config.sharding.granularity.name}", config.sharding.api_name

    @staticmethod
    def axes(sharding: ShardingConfig, world_size: int) -> dict[str, int]:
        """Return the axes of the ranks' mesh and their sizes, the outermost first."""
        raise NotImplementedError

    @property
    def home(self) -> torch.device:
        """Where the optimizer finds parameters and gradients: on the host with offload, else on the device."""
        return self.device if self.config.offload.target is OffloadTarget.none else torch.device("cpu")

    def leaves_some_unused(self, workload: Workload, on_meta: nn.Module | None = None) -> tuple[bool, list[str]]:
        """Return whether every step has to look for parameters without a gradient, and notes about that.

        Args:
            on_meta: a copy of the model; None: the constructor is called.
        """
        return False, []

    def check_made(self, model: nn.Module) -> None:
        """Check what a constructor has made, before it is divided.

        Raises:
            ModelError: a parameter or buffer has no size yet, or is divided already; or something holds on to a
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
        """Divide the layers of a model among neighbouring ranks, in place, and return how; None: they stay whole.

        Args:
            in_tokens: whether the task's loss is our cross entropy of tokens.

        Raises:
            ModelError: there is no plan that fits the model.
        """
        return None

    def divide(self, model: nn.Module, units: Sequence[nn.Module], last: Sequence[nn.Module]) -> None:
        """Check a model without weights, and shard it in place where that comes before they are loaded.

        Args:
            units: as `sharding_units` returns them.
            last: as `last_unit` returns them.

        Raises:
            ModelError: with the name of the first parameter that the configuration cannot train, and a remedy.
        """
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for parameter in model.parameters():
            self._check_parameter(parameter, names[id(parameter)])

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
        """Move a divided model with its weights to where `fills` says."""
        model.to(self.fills[0])

    @property
    def fills(self) -> tuple[torch.device, torch.device]:
        """Where a divided model's parameters get their first values, and its buffers."""
        return (torch.device("cpu"),) * 2 if self.fills_on_host else (self.home, self.device)

    def shard_to_draw(self) -> int:
        """Return a number that differs between ranks which have to draw other numbers for their parts, on a CPU.

        Raises:
            ModelError: they cannot.
        """
        return 0

    def wrap(self, model: nn.Module, find_unused: bool) -> None:
        """Take a divided model with its weights as the one to train.

        Args:
            find_unused: whether some parameters get no gradient.
        """
        self.model = model

    def reduce_in_python(self) -> None:
        """Let a forecast see how gradients are reduced, where PyTorch does so in C++."""

    def divided_loss(self) -> AbstractContextManager[Any]:
        """Return the context of a forward pass, its loss and its backward pass, whose logits may be divided."""
        return nullcontext()

    def microbatch(self, is_last: bool) -> AbstractContextManager[None]:
        """Return the context of a microbatch's forward pass and loss, whose backward pass follows.

        The last microbatch of a step exchanges gradients, and with `training.sync_each_microbatch` every one does.
        """
        return nullcontext()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Explain what a forward pass raises inside, and let it compute in the precision of the trial."""
        with self.explained(forward=True), self.watched():
            yield

    @contextmanager
    def explained(self, forward: bool) -> Iterator[None]:
        """Explain an error of a `forward` or a backward pass that comes from how ranks train.

        Raises:
            UserError: as `explain` returns it.
        """
        try:
            yield
        except (RuntimeError, ValueError, UserError) as error:  # a task may have taken it for a batch that does not fit
            if (why := self.explain(error, forward)) is None:
                raise
            raise why from error

    def explain(self, error: Exception, forward: bool) -> UserError | None:
        """Return an error in a user's words if it comes from how ranks train; else None."""
        return in_16_bits(error, self.config)

    def watched(self) -> AbstractContextManager[None]:
        """Return the context of what uses the model's parameters, in which a use of a part is refused."""
        return nullcontext()

    @contextmanager
    def backward(self, is_last: bool) -> Iterator[None]:
        """Explain what the backward pass of a microbatch raises inside; see `microbatch`."""
        with self.explained(forward=False):
            yield

    def clip(self, max_norm: float | None) -> Tensor:
        """Return the norm of the gradients of all ranks, and scale them down if it exceeds `max_norm`; None: never."""
        alike: dict[Any, list[nn.Parameter]] = {}  # by how they are divided, which tensor parallelism makes different
        for p in self.model.parameters():
            if p.grad is not None:
                alike.setdefault((p.device_mesh, p.placements) if isinstance(p, DTensor) else None, []).append(p)
        # `foreach`: one call for all, of sharded gradients and fake tensors, too, which PyTorch would not choose
        gradients = [[p.grad for p in some if p.grad is not None] for some in alike.values()] or [[]]
        norms = [whole(nn.utils.get_total_norm(some, foreach=True)) for some in gradients]
        norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
        for some in alike.values():
            if max_norm is not None:
                nn.utils.clip_grads_with_norm_(some, max_norm, norm, foreach=True)
        return norm

    def check_gradients(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Check that ranks which train the same samples have the same gradients of what is not divided among them.

        Raises:
            UserError: with the name of a parameter of which they have not.
        """

    def sent(self, func: Any, output: Any, given: Any, seen: Seen) -> Iterator[tuple[Any, str]]:
        """Yield what a collective gathers or scatters, each with what it is for, of a step that is recorded."""
        yield (output, "all_gather") if func is GATHER else (given, "reduce_scatter")

    def made_for(self, func: Any, args: Any, kwargs: dict[str, Any], seen: Seen) -> str:
        """Return what an operator's results are for, of a step that is recorded; "": nothing of this way's own."""
        return ""

    def reshard(self) -> None:
        """Free what an evaluation has left gathered, so that the next pass gathers it again."""

    def scaler(self) -> torch.amp.GradScaler:
        """Return the dynamic loss scaler for float16; a disabled one passes everything through.

        It is where the gradients are: GradScaler copies its tensors to their device without waiting, and a CPU would
        read them before they arrive.
        """
        precision = self.config.precision
        scaler = (ShardedGradScaler if self.asks_all else torch.amp.GradScaler)(
            self.home.type,
            init_scale=precision.init_scale,
            growth_interval=precision.growth_interval,
            enabled=precision.loss_scaling,
        )
        scaler.scale(torch.zeros((), device=self.home))  # the first tensor that is scaled says where the scale is kept
        return scaler


def type_of(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor that ranks have divided as each rank would have it alone."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
