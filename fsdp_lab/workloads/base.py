"""The contract between what is trained and what trains it: all that training, memory and forecasts see of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.flop_counter import FlopCounterMode

from fsdp_lab.workloads.construct import Blueprint, seeded

# Tensors in any nesting of tuples, lists and dictionaries. Only the task and the data set look inside.
Batch = Any
_COMPARED = 32  # samples, of which the number of tokens is looked at


@dataclass(frozen=True)
class ModelSpec:
    """How to build a model, and the classes of its repeating blocks.

    `build`: the constructor; what it gives the parameters after `torch.manual_seed(training.seed)` are the first
    weights. `block_classes`: None where they are to be found in the model. `description`: the model in a few words,
    for the reader of a memory timeline. `load_weights`: puts other first weights into parameters and buffers, divided
    or not, by their names; each rank calls it; None: those of the constructor. `save`: writes whole weights and what
    else the model's own format has into a folder; None: it has none.
    """

    build: Callable[[], nn.Module]
    block_classes: tuple[type[nn.Module], ...] | None
    description: str
    load_weights: Callable[[Mapping[str, Tensor]], None] | None = None
    save: Callable[[Mapping[str, Tensor], Path], None] | None = None


class Dataset(Protocol):
    """Serves whole batches by the indices of their items; -1 stands for padding, which no metric counts."""

    def __len__(self) -> int: ...

    def __getitem__(self, indices: Tensor, /) -> Batch: ...


@dataclass(frozen=True)
class Data:
    """Both splits. `digest` differs when an item does. `bytes_per_token`: of the validation split; None: no text.
    `vocab_size`: every token is less; None: not known."""

    train: Dataset
    val: Dataset
    digest: str
    bytes_per_token: float | None = None
    vocab_size: int | None = None


@dataclass(frozen=True)
class DataSpec:
    """Where batches come from.

    `prepare` downloads what is missing; one process of each node calls it, before any calls `load`. Both raise
    UserError. `example_batch(size)` has the shapes, types and allocations of a batch that the loader serves, from
    uninitialised memory: forecasts call it under fake tensors, once they have called it before with the same size, and
    FLOPs are counted with it on `meta`.
    """

    prepare: Callable[[], None]
    load: Callable[[], Data]
    example_batch: Callable[[int], Batch]


class Task(Protocol):
    """What the model learns from a batch. Called with batches on the model's device.

    Where batches differ in how many labels count, the task has a method `num_labels(batch)` too, which returns that
    number as a scalar tensor. The loss of a step is then the mean over all labels of its global batch; without the
    method each microbatch weighs the same.
    """

    unit: str  # what is counted: samples, or tokens, of which the loss is a mean in nats

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        """Return the model's outputs. Only this runs under autocast."""

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the mean loss of the batch, a scalar."""

    def metrics(self, outputs: Any, batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
        """Return `name -> (sum, count)`, `loss` among them; sums and counts are added up over batches and ranks."""

    def units(self, batch: Batch) -> int:
        """Return how many of the unit a batch has, without the padding that the task knows; of a batch on `meta`, how
        many one of its shape has without padding."""


@dataclass(frozen=True)
class Workload:
    """A model, a data set and a task. `flops_per_unit`: of training on one of the task's units; None: counted."""

    model: ModelSpec
    data: DataSpec
    task: Task
    flops_per_unit: float | None = None

    def train_flops_per_sample(self) -> float | None:
        """Return the FLOPs of forward and backward for one sample: by `flops_per_unit`, or for tokens by what the
        model's own method `flops_per_token` says of a batch, else the matrix FLOPs, counted on `meta`, the backward as
        twice the forward. Recomputation is not counted: MFU is about the model's own work. None where a model cannot
        compute without values."""
        if self.flops_per_unit is not None:
            return self.flops_per_unit * self.task.units(self._meta_batch())
        with suppress(Exception):  # whatever a forward pass raises where there are no values
            return self._counted_flops()
        return None

    def _counted_flops(self) -> float:
        model, batch = self._on_meta()
        if self.task.unit == "tokens" and callable(own := getattr(model, "flops_per_token", None)):
            return float(own(batch)) * self.task.units(batch)
        with FlopCounterMode(display=False) as counter:  # gradients are recorded: without them a task is validated
            self.task.forward(model.eval(), batch)
        return 3.0 * counter.get_total_flops()

    def tokens_per_sample(self, dataset: Dataset) -> int | None:
        """Return the tokens of each sample; None where samples are what is counted, or where some have more than
        others: padding would count, and the FLOPs of one say nothing of another. Reads a few samples."""
        if self.task.unit != "tokens":
            return None
        chosen = torch.linspace(0, len(dataset) - 1, min(_COMPARED, len(dataset)), dtype=torch.float64).long()
        with seeded(0):
            found = {self.task.units(dataset[index]) for index in chosen.split(1)}
        return found.pop() if len(found) == 1 else None

    def shaped_tokens(self) -> int | None:
        """Return the tokens of a sample by its shape alone; None where samples are what is counted."""
        return self.task.units(self._meta_batch()) if self.task.unit == "tokens" else None

    def parameters_without_gradient(self) -> list[str]:
        """Return the names of those that a step leaves without one, as a step on `meta` shows, frozen ones apart."""
        model, batch = self._on_meta()
        self.task.loss(self.task.forward(model, batch), batch).backward()
        return [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]

    def _on_meta(self) -> tuple[nn.Module, Batch]:
        """The model, and a batch of one sample."""
        model = Blueprint(self.model.build, seed=0).model.to("meta")
        return model, self._meta_batch()

    def _meta_batch(self) -> Batch:
        with torch.device("meta"):
            return self.data.example_batch(1)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Copy a batch to the device, without waiting where its memory is pinned."""
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)


def tensors_of(batch: Batch) -> list[Tensor]:
    """Return the tensors of a batch, or of a list of batches, in their order."""
    if isinstance(batch, Tensor):
        return [batch]
    parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, tuple | list) else ()
    return [tensor for part in parts for tensor in tensors_of(part)]


def map_tensors(function: Callable[[Tensor], Any], batch: Batch) -> Batch:
    """Return the same nesting of dicts, lists and tuples with `function(tensor)` in the place of each tensor. A
    subclass of dict comes back as a dict; everything else stays as it is."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, dict):
        return {key: map_tensors(function, value) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        values = [map_tensors(function, value) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch


def plain_class(module: nn.Module) -> type:
    """Return the class that a module had before `fully_shard` put its own in front."""
    return next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))


def describe(batch: Batch) -> str:
    """Return the shapes and types of a batch, for a message: `{x: 8x3 float32, y: 8 int64}`."""
    if isinstance(batch, Tensor):
        return f"{shape_of(batch)} {str(batch.dtype).removeprefix('torch.')}"
    if isinstance(batch, dict):
        return "{" + ", ".join(f"{key}: {describe(value)}" for key, value in batch.items()) + "}"
    if isinstance(batch, tuple | list):
        return "(" + ", ".join(map(describe, batch)) + ")"
    return type(batch).__name__


def shape_of(tensor: Tensor) -> str:
    """Return the shape of a tensor, for a message: `8x3`."""
    return "x".join(map(str, tensor.shape)) or "scalar"
