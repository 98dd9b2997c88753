"""The batches of a trial's first steps, read from the user's data set in one process: for `plain.py`."""

from __future__ import annotations

import copy
import dataclasses
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from fsdp_lab.config import TrialConfig
from fsdp_lab.config.metrics import CHECK_SAMPLES, CHECK_STEPS
from fsdp_lab.config.target import import_callable, instantiate
from fsdp_lab.training.plain_limits import Deadline
from fsdp_lab.training.plain_state import seed_all

Part = tuple[Any, int]  # a microbatch of a rank, and the number of its items


class Batches:
    """Both splits, dealt to ranks as the trial deals them.

    Args:
        model: makes the batches of `data=example`.
        deadline: checked before a batch is read.
    """

    def __init__(self, config: TrialConfig, model: nn.Module, parts: int, deadline: Deadline) -> None:
        self.config, self.parts, self.deadline = config, parts, deadline
        self._train, self._num_train = self._split("train", model, config.data.num_train)
        self._val, self._num_val = self._split("val", model, config.data.num_val)

    @property
    def steps_per_epoch(self) -> int:
        return self._num_train // self.config.training.global_batch_size

    @property
    def num_steps(self) -> int:
        return min(CHECK_STEPS, self.steps_per_epoch, self.config.training.max_steps or CHECK_STEPS)

    def train(self, step: int) -> list[list[Part]]:
        """Return the microbatches of each rank: the first epoch is a permutation by the seed, cut into steps."""
        training = self.config.training
        generator = torch.Generator().manual_seed(training.seed * 1_000_003)
        order = torch.randperm(self._num_train, generator=generator).split(training.global_batch_size)[step]
        dealt = order.view(training.grad_accum_steps, self.parts, -1).transpose(0, 1)
        return [[self._read(self._train, indices, "0") for indices in rank] for rank in dealt]

    def val(self) -> Iterator[Iterator[Part]]:
        """Yield the microbatches of each rank: samples are dealt in turn, and padded with -1, which is not read."""
        training, count = self.config.training, min(self._num_val, CHECK_SAMPLES)
        dealt = torch.cat([torch.arange(count), torch.full((-count % self.parts,), -1)])
        size = training.global_batch_size // self.parts // training.grad_accum_steps
        for rank in range(self.parts):
            some = dealt[rank :: self.parts].split(size)
            yield (self._read(self._val, indices, "val") for indices in some if indices[0] >= 0)

    def _split(self, name: str, model: nn.Module, most: int | None) -> tuple[Callable[[list[int]], Any], int]:
        """Return what reads a batch by the numbers of its items, and the number of items."""
        config, function = self.config, self.config.data.function()
        if function is None:  # data=example
            return lambda indices: _example(model, len(indices)), most or 1024
        arguments = config.data.arguments_for(config.model)
        seed_all(0)
        items = function(split=name, **instantiate(arguments, "data"))
        collate_fn = config.data.collate_fn
        collate = import_callable(collate_fn, "data.collate_fn") if collate_fn else default_collate
        read = getattr(items, "__getitems__", None) or (lambda indices: [items[i] for i in indices])
        return lambda indices: collate(read(indices)), min(len(items), most or len(items))

    def _read(self, read: Callable[[list[int]], Any], indices: Tensor, epoch: str) -> Part:
        """Return a batch; random numbers that the data set draws depend on seed, epoch and items only."""
        self.deadline.check()
        seed_all(zlib.crc32(indices.numpy().tobytes(), zlib.crc32(f"{self.config.training.seed}/{epoch}".encode())))
        own = indices[indices >= 0].tolist()
        return read(own), len(own)


def _example(model: Any, size: int) -> Any:
    seed_all(0)
    with torch.device("cpu"):
        return model.example_batch(size)


def moved(batch: Any, device: torch.device) -> Any:
    """Return a copy of a batch on a device: of tensors in any nesting, and of objects with a method `to`."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    if callable(getattr(batch, "to", None)) and not isinstance(batch, Mapping):
        made = copy.copy(batch)  # some objects move in place
        other = made.to(device)
        return made if other is None else other
    if isinstance(batch, Mapping):
        return {name: moved(value, device) for name, value in batch.items()}
    if isinstance(batch, list):
        made = copy.copy(batch)
        made[:] = [moved(value, device) for value in batch]
        return made
    if isinstance(batch, tuple):
        parts = [moved(value, device) for value in batch]
        try:
            made = tuple.__new__(type(batch), parts)  # the class's `__new__` may have other arguments
        except TypeError:  # of a class in C only its own works
            return type(batch)(parts)
        if hasattr(batch, "__dict__"):
            vars(made).update(vars(batch))
        return made
    if dataclasses.is_dataclass(batch):
        made = copy.copy(batch)
        for field in dataclasses.fields(batch):
            object.__setattr__(made, field.name, moved(getattr(batch, field.name), device))
        return made
    return batch
