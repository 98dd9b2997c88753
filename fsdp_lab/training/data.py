"""Both splits of a workload, divided among the ranks in an order that depends on seed and epoch only."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from fsdp_lab.config.errors import ConfigError
from fsdp_lab.config.metrics import CHECK_SAMPLES
from fsdp_lab.config.training import TrainingConfig
from fsdp_lab.config.trial import TrialConfig
from fsdp_lab.machine.hardware import default_loader_workers, worker_cpus
from fsdp_lab.training.distributed import DistributedContext, ParallelDims, together
from fsdp_lab.workloads.base import Batch, Data, Dataset, DataSpec
from fsdp_lab.workloads.construct import seed_all


def load_data(spec: DataSpec, ranks: DistributedContext) -> Data:
    """Return both splits. One process of each node downloads missing files while the others wait.

    Raises:
        UserError: the data are missing, or do not suit the model. Every rank raises this error, and any other.
    """
    together(spec.prepare if ranks.local_rank == 0 else lambda: None)
    return together(spec.load)


class TrainOrder(Sampler[Tensor]):
    """The indices of each microbatch of this rank, through one epoch.

    An epoch is a permutation of the training samples, cut into global batches; a rest at its end is dropped. Each
    global batch is cut by microbatch first and rank second. So a step has the same samples with any number of workers.

    Raises:
        ConfigError: a global batch is larger than the split.
    """

    def __init__(self, count: int, training: TrainingConfig, dims: ParallelDims) -> None:
        self.count, self.training, self.dims = count, training, dims
        self.epoch = self.steps_done = 0
        self.steps_per_epoch = count // training.global_batch_size
        if self.steps_per_epoch == 0:
            raise ConfigError(
                f"training.global_batch_size={training.global_batch_size} is more than the {count} training "
                f"samples; use at most {count}."
            )

    def go_to(self, epoch: int, steps_done: int) -> None:
        """Start after so many optimizer steps of an epoch."""
        self.epoch, self.steps_done = epoch, steps_done

    def __len__(self) -> int:
        return (self.steps_per_epoch - self.steps_done) * self.training.grad_accum_steps

    def __iter__(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(self.training.seed * 1_000_003 + self.epoch)
        order = torch.randperm(self.count, generator=generator)
        shape = (self.training.grad_accum_steps, self.dims.dp_degree, -1)
        size = self.training.global_batch_size
        for step in order[self.steps_done * size : self.steps_per_epoch * size].split(size):
            yield from step.view(shape)[:, self.dims.dp_rank]


def microbatch_size(training: TrainingConfig, dims: ParallelDims) -> int:
    """Return the number of samples in a microbatch of one rank."""
    return training.global_batch_size // dims.dp_degree // training.grad_accum_steps


def val_order(count: int, batch_size: int, dims: ParallelDims) -> Sequence[Tensor]:
    """Return the microbatches of this rank: every validation sample once over all ranks, dealt to them in turn.

    They are padded with the index -1, because all ranks must step together.
    """
    per_rank = -(-count // dims.dp_degree)
    indices = torch.full((per_rank * dims.dp_degree,), -1)
    indices[:count] = torch.arange(count)
    return indices[dims.dp_rank :: dims.dp_degree].split(batch_size)


class SeededOrder(Sampler[tuple[int, Tensor]]):
    """The batches of an order, each with a seed that depends only on `training.seed`, the epoch and its items."""

    def __init__(self, order: TrainOrder | Sequence[Tensor], seed: int) -> None:
        self.order, self.seed = order, seed

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        epoch = self.order.epoch if isinstance(self.order, TrainOrder) else "val"
        for indices in self.order:
            yield zlib.crc32(indices.numpy().tobytes(), zlib.crc32(f"{self.seed}/{epoch}".encode())), indices


class Seeded:
    """Seeds all generators before it reads a batch.

    A data set's random numbers are then the same in this process, in loader processes, and after a resume.
    """

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, seed_and_indices: tuple[int, Tensor]) -> Batch:
        seed, indices = seed_and_indices
        seed_all(seed)
        return self.dataset[indices]


@dataclass(frozen=True)
class Loaders:
    """Both splits as this rank reads them.

    Attributes:
        order: of the training split; `go_to` selects the epoch.
        train: whole microbatches.
        val: whole microbatches, padded with the index -1.
        first_val: of the first samples, for a comparison with a plain loop.
        size: the items of a microbatch.
    """

    data: Data
    order: TrainOrder
    train: DataLoader[Batch]
    val: DataLoader[Batch]
    first_val: DataLoader[Batch]
    size: int

    @property
    def steps_per_epoch(self) -> int:
        return self.order.steps_per_epoch

    def go_to(self, epoch: int, steps_done: int) -> None:
        self.order.go_to(epoch, steps_done)

    def is_over(self, steps_done: int) -> bool:
        """Return whether an epoch has ended after so many steps."""
        return steps_done >= self.steps_per_epoch

    def items_of(self, batch: Batch) -> int:
        """Return the items of a microbatch of the training split."""
        return self.size

    def resume(self) -> list[str]:
        """Return no note: the order depends only on the step."""
        return []


def build_loaders(data: Data, config: TrialConfig, dims: ParallelDims, device: torch.device) -> Loaders:
    """Return the loaders of both splits for this rank.

    Raises:
        ConfigError: a global batch is larger than the training split.
    """
    order, size = TrainOrder(len(data.train), config.training, dims), microbatch_size(config.training, dims)
    validated = val_order(len(data.val), config.data.val_batch_size or size, dims)
    first = val_order(min(len(data.val), CHECK_SAMPLES), size, dims)
    workers, seed = config.data.loader_workers, config.training.seed
    return Loaders(
        data,
        order,
        build_loader(data.train, order, workers, device, seed),
        build_loader(data.val, validated, workers, device, seed),
        build_loader(data.val, first, 0, device, seed),
        size,
    )


def _as_it_is(batch: Batch) -> Batch:
    return batch


def build_loader(
    dataset: Dataset,
    order: TrainOrder | Sequence[Tensor],
    loader_workers: int | None,
    device: torch.device,
    seed: int = 0,
) -> DataLoader[Batch]:
    """Return a loader of whole microbatches.

    Args:
        loader_workers: processes that prepare batches; None: as many as suit the device.
        device: batches are pinned if it is a GPU.
        seed: of the data set's random numbers.
    """
    if loader_workers is None:
        loader_workers = default_loader_workers(device.type == "cuda", worker_cpus())
    return DataLoader(
        Seeded(dataset),  # type: ignore[arg-type]
        sampler=SeededOrder(order, seed),
        batch_size=None,
        collate_fn=_as_it_is,  # PyTorch would make lists of tuples, and other classes of some
        num_workers=loader_workers,
        persistent_workers=loader_workers > 0,
        pin_memory=device.type == "cuda",
    )
