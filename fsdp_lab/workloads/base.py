"""The contract between a workload and its training: all that training and forecasts see of a workload."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from fsdp_lab.workloads.construct import seeded, without_values
from fsdp_lab.workloads.flops import Uncounted
from fsdp_lab.workloads.generators import PROCESS, generators_of, in_bytes

# Tensors in any nesting of tuples, lists, mappings, dataclasses and objects that have a method `to`. Only the task and
# the data set look inside.
Batch = Any
Loss = Tensor | tuple[Tensor, Tensor]  # a mean, or a sum and the number of labels that count
_DRAWS = 8  # how many steps are searched for unused parameters if the model draws random numbers
_COMPARED = 32  # how many samples are compared in their number of tokens


@dataclass(frozen=True)
class ModelSpec:
    """How to build a model, and the classes of its repeating blocks.

    Attributes:
        build: the constructor. What it makes after `torch.manual_seed(training.seed)` is trained.
        block_classes: None: they are detected in the model.
        description: the model in a few words, for the reader of a memory timeline.
        load_weights: loads first weights into parameters and buffers by their names, sharded or not; each rank calls
            it. None: the constructor's weights are used.
        save: writes whole weights, and the rest of the model's own format, into a folder. None: it has no own format.
    """

    build: Callable[[], nn.Module]
    block_classes: tuple[type[nn.Module], ...] | None
    description: str
    load_weights: Callable[[Mapping[str, Tensor]], None] | None = None
    save: Callable[[Mapping[str, Tensor], Path], None] | None = None


class Dataset(Protocol):
    """Serves whole batches by the indices of their items; -1 is padding, which no metric counts."""

    def __len__(self) -> int: ...

    def __getitem__(self, indices: Tensor, /) -> Batch: ...


@dataclass(frozen=True)
class Data:
    """Both splits.

    Attributes:
        digest: differs if an item does.
        bytes_per_token: of the validation split; None: it is not text.
        vocab_size: every token is less than this; None: not known.
    """

    train: Dataset
    val: Dataset
    digest: str
    bytes_per_token: float | None = None
    vocab_size: int | None = None


@dataclass(frozen=True)
class DataSpec:
    """Where batches come from.

    Attributes:
        prepare: downloads missing files. One process of each node calls it, before any calls `load`. Raises UserError.
        load: returns both splits. Raises UserError.
        example_batch: returns a batch of a given size, of uninitialised memory, with the shapes, types and allocations
            of a loader's batch. Forecasts call it under fake tensors, after a first call with the same size. FLOPs are
            counted with it on `meta`.
        loader: returns the user's own loader of a split, in place of `load`; None: there is none. Raises UserError.
    """

    prepare: Callable[[], None]
    load: Callable[[], Data]
    example_batch: Callable[[int], Batch]
    loader: Callable[..., Any] | None = None


class Task(Protocol):
    """What the model learns from a batch. Methods get batches on the model's device.

    Batches may differ in the number of labels that count. Then the task has a method `num_labels(batch)`, which returns
    that number as a scalar tensor, or its loss returns it: the loss of a step is the mean over all labels of its global
    batch. Else each microbatch weighs the same. A task with a loss of ours may have a method `compile_loss()`. A task
    of several losses has a method `take_step`, see `UserStep`; its loss is then only for validation.
    """

    unit: str  # what is counted: samples; or tokens, if the loss is a mean over tokens in nats

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        """Return the model's outputs. Only this runs under autocast."""

    def loss(self, outputs: Any, batch: Batch) -> Loss:
        """Return the mean loss of the batch, a scalar; or always its sum and the number of labels that count."""

    def metrics(self, outputs: Any, batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
        """Return `name -> (sum, count)`, including `loss`. Sums and counts are added up over batches and ranks."""

    def units(self, batch: Batch) -> int | None:
        """Return the number of units in a batch, without padding that the task knows; None: only its loss knows it.

        For a batch on `meta`, return the number of a batch of that shape without padding.
        """


@dataclass(frozen=True)
class Workload:
    """A model, a data set and a task.

    Attributes:
        flops_per_unit: FLOPs of training on one of the task's units; None: counted.
    """

    model: ModelSpec
    data: DataSpec
    task: Task
    flops_per_unit: float | None = None

    def train_flops_per_sample(self, on_meta: nn.Module | None = None) -> float | None:
        """Return the FLOPs of forward and backward for one sample.

        None if the model cannot compute without values, or calls an operator with unknown FLOPs.

        They come from `flops_per_unit`; for tokens from the model's own method `flops_per_token(batch)`; else the
        matrix FLOPs of a step are counted on `meta`. Gradients that frozen weights and inputs do not need are not
        counted, nor is recomputation, because MFU is about the model's own work.

        Args:
            on_meta: a copy of the model; None: the constructor is called.
        """
        if self.flops_per_unit is not None:
            units = self.task.units(self._meta_batch())
            return None if units is None else self.flops_per_unit * units
        with suppress(Exception):  # without values a forward pass may raise anything
            return self._counted_flops(self._without_values(on_meta))
        return None

    def _counted_flops(self, model: nn.Module) -> float | None:
        batch = self._meta_batch()
        if self.task.unit == "tokens" and callable(own := getattr(model, "flops_per_token", None)):
            units = self.task.units(batch)
            return None if units is None else float(own(batch)) * units
        with Uncounted() as unknown, FlopCounterMode(display=False) as counter:
            self._backward(model.eval(), batch)
        return None if unknown.names else float(counter.get_total_flops())

    def _backward(self, model: nn.Module, batch: Batch) -> None:
        def descend(name: str, task: Task) -> Tensor:
            loss = task.loss(task.forward(model, batch), batch)
            first = loss[0] if isinstance(loss, tuple) else loss
            first.backward()
            return first.detach()

        take_step = getattr(self.task, "take_step", None)
        if take_step is None:
            descend("model", self.task)
        else:
            take_step(model, 1, descend)

    def tokens_per_sample(self, dataset: Dataset) -> int | None:
        """Return the tokens of each sample, from a few samples that are read.

        None if samples are counted, if only the loss knows tokens, or if samples differ: padding would count, and
        samples would have different FLOPs.
        """
        if self.task.unit != "tokens" or not len(dataset):
            return None
        chosen = torch.linspace(0, len(dataset) - 1, min(_COMPARED, len(dataset)), dtype=torch.float64).long()
        with seeded(0):
            counts = {self.task.units(dataset[index]) for index in chosen.split(1)}
        return counts.pop() if len(counts) == 1 else None

    def shaped_tokens(self) -> int | None:
        """Return the tokens of a sample by its shape alone; None if samples are counted."""
        return self.task.units(self._meta_batch()) if self.task.unit == "tokens" else None

    def parameters_without_gradient(self, on_meta: nn.Module | None = None) -> list[str]:
        """Return the names of the trainable parameters that a step on `meta` leaves without a gradient.

        A model that draws random numbers may leave out other parameters in each step, so several steps are tried.

        Args:
            on_meta: a copy of the model; None: the constructor is called.
        """
        model, batch, found = self._without_values(on_meta), self._meta_batch(2), list[str]()  # a batch norm wants two
        for seed in range(_DRAWS):
            model.zero_grad()
            with seeded(seed):
                before = _states_of_generators(model)
                self._backward(model, batch)
                drew = _states_of_generators(model) != before
            found += [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
            if not drew:
                break
        model.zero_grad()
        return list(dict.fromkeys(found))

    def _without_values(self, on_meta: nn.Module | None) -> nn.Module:
        return (without_values(self.model.build) if on_meta is None else on_meta).to("meta")

    def _meta_batch(self, size: int = 1) -> Batch:
        with torch.device("meta"):
            return self.data.example_batch(size)


def _states_of_generators(model: nn.Module) -> list[bytes]:
    read = [torch.get_rng_state, *(read for read, _ in (*PROCESS, *generators_of(model.modules())))]
    return [in_bytes(each()) for each in read]


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Return a copy of a batch on the device. Does not wait for the copy if the batch's memory is pinned."""

    def move(holder: Any) -> Any:
        made = copy.copy(holder)  # some objects move in place
        moved = made.to(device)
        return made if moved is None else moved

    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch, move)


def parts_of(batch: Batch) -> list[tuple[Any, Any]]:
    """Return the parts of a mapping, a tuple or list, a dataclass, or another object with a method `to`."""
    if isinstance(batch, Mapping):
        return [*batch.items()]
    if isinstance(batch, tuple | list):
        return [*enumerate(batch)]
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return [(field.name, getattr(batch, field.name)) for field in dataclasses.fields(batch)]
    return [*vars(batch).items()] if _moves(batch) and hasattr(batch, "__dict__") else []


def _moves(batch: Batch) -> bool:
    return not isinstance(batch, Mapping | nn.Module) and callable(getattr(type(batch), "to", None))


def tensors_of(batch: Batch) -> list[Tensor]:
    if isinstance(batch, Tensor):
        return [batch]
    return [tensor for _, part in parts_of(batch) for tensor in tensors_of(part)]


def map_tensors(function: Callable[[Tensor], Any], batch: Batch, move: Callable[[Any], Any] | None = None) -> Batch:
    """Return a copy of a batch, in the same classes, with `function(tensor)` in place of each tensor.

    A mapping that cannot be made again becomes a dict; every value without parts stays as it is.

    Args:
        move: for an object with a method `to`; None: by its attributes.
    """
    if isinstance(batch, Tensor):
        return function(batch)
    if move is not None and _moves(batch):
        return move(batch)
    parts = {key: map_tensors(function, part, move) for key, part in parts_of(batch)}
    if isinstance(batch, dict | UserDict):
        made = copy.copy(batch)  # as its class copies it
        dict.update(made, parts) if isinstance(made, dict) else made.update(parts)
        return made
    if isinstance(batch, Mapping):
        try:
            return type(batch)(parts)  # type: ignore[call-arg]
        except TypeError:
            return parts
    if isinstance(batch, list):
        listed = copy.copy(batch)
        listed[:] = parts.values()
        return listed
    if isinstance(batch, tuple):
        return _tuple_like(batch, parts.values())
    if not parts:
        return batch
    made = copy.copy(batch)
    for name, part in parts.items():
        object.__setattr__(made, name, part)  # of a frozen dataclass, too
    return made


def _tuple_like(batch: tuple[Any, ...], values: Iterable[Any]) -> tuple[Any, ...]:
    """Return a tuple of the same class, with the same attributes. Its own `__new__` may have other arguments."""
    values = [*values]
    try:
        made: tuple[Any, ...] = tuple.__new__(type(batch), values)
    except TypeError:  # of a class in C only its own works
        return type(batch)(values)
    if hasattr(batch, "__dict__"):
        vars(made).update(vars(batch))
    return made


def part_of(outputs: Any, name: str) -> Any:
    """Return the key or attribute of a model's outputs with this name; None: there is none."""
    return outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside DDP's or FSDP1's wrapper; FSDP2 has no wrapper."""
    return model.module if isinstance(model, DistributedDataParallel | FullyShardedDataParallel) else model


def original_name(name: str) -> str:
    """Return the name that a module or a tensor had before FSDP1 and `torch.compile` wrapped modules."""
    return ".".join(part for part in name.split(".") if part not in ("_fsdp_wrapped_module", "_orig_mod"))


def plain_class(module: nn.Module) -> type:
    """Return the class that a module had before `fully_shard` replaced it with a subclass of FSDPModule."""
    return next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))


def describe(batch: Batch) -> str:
    """Return the shapes and types of a batch, for a message: `{x: 8x3 float32, y: 8 int64}`."""
    if isinstance(batch, Tensor):
        return f"{shape_of(batch)} {str(batch.dtype).removeprefix('torch.')}"
    if isinstance(batch, tuple | list):
        return "(" + ", ".join(map(describe, batch)) + ")"
    if not (parts := parts_of(batch)):
        return type(batch).__name__
    return "{" + ", ".join(f"{key}: {describe(value)}" for key, value in parts) + "}"


def shape_of(tensor: Tensor) -> str:
    """Return the shape of a tensor, for a message: `8x3`; of a nested one `8x*`."""
    return "x".join(str(size) if isinstance(size, int) else "*" for size in tensor.shape) or "scalar"
