"""The batches of a trial's first steps from the user's own loader, called once for each rank: for `plain.py`."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator, Mapping
from itertools import count, islice
from typing import Any

from torch import Tensor, nn

from fsdp_lab.config import TrialConfig
from fsdp_lab.config.metrics import CHECK_BATCHES, CHECK_STEPS
from fsdp_lab.config.target import instantiate
from fsdp_lab.training.plain_data import Part
from fsdp_lab.training.plain_limits import Deadline
from fsdp_lab.training.plain_state import seed_all


class LoaderBatches:
    """Both splits, as each rank's own loader gives them; see `Batches`."""

    def __init__(self, config: TrialConfig, model: nn.Module, parts: int, deadline: Deadline) -> None:
        self.config, self.parts, self.deadline = config, parts, deadline
        self._train, self._val = ([self._loader(split, rank) for rank in range(parts)] for split in ("train", "val"))
        training = config.training
        most = min(CHECK_STEPS, training.max_steps or CHECK_STEPS, training.epoch_steps or CHECK_STEPS)
        self._steps = [*islice(self._passes(), most)]

    @property
    def steps_per_epoch(self) -> int | None:
        """None: the loaders do not tell."""
        if (steps := self.config.training.epoch_steps) is not None:
            return steps
        try:
            return min(map(len, self._train)) // self.config.training.grad_accum_steps
        except (TypeError, NotImplementedError):
            return None

    @property
    def num_steps(self) -> int:
        return len(self._steps)

    def train(self, step: int) -> list[list[Part]]:
        """Return the microbatches of each rank."""
        return self._steps[step]

    def val(self) -> Iterator[Iterator[Part]]:
        """Yield the microbatches of each rank."""
        for loader in self._val:
            yield islice(self._read(loader, "val"), CHECK_BATCHES)

    def _loader(self, split: str, rank: int) -> Any:
        training = self.config.training
        size = training.global_batch_size // self.parts // training.grad_accum_steps
        arguments = instantiate(self.config.data.arguments_for(self.config.model), "data")
        seed_all(0)
        return self.config.data.function()(
            split=split, batch_size=size, rank=rank, world_size=self.parts, seed=training.seed, **arguments
        )

    def _passes(self) -> Iterator[list[list[Part]]]:
        """Yield steps, of one pass over the loaders or of several; a pass ends where a rank has no whole step."""
        accum = self.config.training.grad_accum_steps
        for number in count():
            for loader in self._train:
                parts = (getattr(loader, name, None) for name in ("sampler", "batch_sampler", "dataset"))
                for part in (loader, *parts):
                    getattr(part, "set_epoch", lambda epoch: None)(number)
            ranks = [self._read(loader, str(number)) for loader in self._train]
            while True:
                step = [[*islice(rank, accum)] for rank in ranks]
                if any(len(part) < accum for part in step):
                    break
                yield step
            if self.config.training.epoch_steps is None:
                return

    def _read(self, loader: Any, name: str) -> Iterator[Part]:
        """Yield the batches of a rank; random numbers that are drawn depend on the seed and a batch's number only."""
        self._draw(name, -1)
        batches = iter(loader)
        for i in count():
            self.deadline.check()
            self._draw(name, i)
            if (batch := next(batches, None)) is None:
                return
            yield batch, next((len(tensor) for tensor in _tensors(batch) if tensor.ndim), 1)

    def _draw(self, name: str, i: int) -> None:
        seed_all(zlib.crc32(f"{self.config.training.seed}/{name}/{i}".encode()))


def _tensors(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors of a batch in their order."""
    if isinstance(batch, Tensor):
        yield batch
        return
    if isinstance(batch, Mapping):
        parts: Any = batch.values()
    elif isinstance(batch, tuple | list):
        parts = batch
    elif dataclasses.is_dataclass(batch):
        parts = [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    else:
        parts = vars(batch).values() if callable(getattr(batch, "to", None)) and hasattr(batch, "__dict__") else ()
    for part in parts:
        yield from _tensors(part)
