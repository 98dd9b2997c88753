"""Both splits of a workload, served in an order that depends on seed and epoch only, and divided among the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from fsdp_lab.config.errors import ConfigError, UserError
from fsdp_lab.config.training import TrainingConfig
from fsdp_lab.config.trial import TrialConfig
from fsdp_lab.hardware import default_loader_workers, worker_cpus
from fsdp_lab.training.distributed import ParallelDims, Ranks, gather
from fsdp_lab.workloads.base import Batch, Data, Dataset, DataSpec


def load_data(spec: DataSpec, ranks: Ranks) -> Data:
    """Both splits. Where files are downloaded, one process of each node does it and the others wait.

    Raises:
        UserError: the data cannot be had, or does not suit the model.
    """
    problem = ""
    if ranks.local_rank == 0:
        try:
            spec.prepare()
        except UserError as error:
            problem = str(error)
    if problems := [text for text in gather(problem) if text]:
        raise UserError(problems[0])
    return spec.load()


class TrainOrder(Sampler[Tensor]):
    """The indices of each microbatch of this rank, through one epoch.

    An epoch is a permutation of the training samples, cut into global batches; what is left over at its
    end is not used. Each global batch is cut by microbatch first and rank second, so that the samples of
    an optimizer step are the same for every number of workers.
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
        """Begin after so many optimizer steps of an epoch."""
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
    """The samples that one rank takes at once."""
    return training.global_batch_size // dims.dp_degree // training.grad_accum_steps


class ValOrder(Sampler[Tensor]):
    """Every validation sample once, dealt to the ranks in turn; padded, since all ranks must step together."""

    def __init__(self, count: int, batch_size: int, dims: ParallelDims) -> None:
        per_rank = -(-count // dims.dp_degree)
        indices = torch.full((per_rank * dims.dp_degree,), -1)
        indices[:count] = torch.arange(count)
        self.batches: Sequence[Tensor] = indices[dims.dp_rank :: dims.dp_degree].split(batch_size)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.batches)


@dataclass(frozen=True)
class Loaders:
    """Both splits as this rank takes them. `order`: of the training split, to be sent to an epoch."""

    order: TrainOrder
    train: DataLoader[Batch]
    val: DataLoader[Batch]


def build_loaders(data: Data, config: TrialConfig, dims: ParallelDims, device: torch.device) -> Loaders:
    """
    Raises:
        ConfigError: a global batch is more than there are training samples.
    """
    order = TrainOrder(len(data.train), config.training, dims)
    val_order = ValOrder(len(data.val), microbatch_size(config.training, dims), dims)
    workers = config.data.loader_workers
    return Loaders(
        order, build_loader(data.train, order, workers, device), build_loader(data.val, val_order, workers, device)
    )


def build_loader(
    dataset: Dataset, order: Sampler[Tensor], loader_workers: int | None, device: torch.device
) -> DataLoader[Batch]:
    """A loader of whole microbatches: the sampler's item is the list of indices of one.

    Args:
        loader_workers: the processes that prepare batches; None: as many as suit the device.
    """
    if loader_workers is None:
        loader_workers = default_loader_workers(device.type == "cuda", worker_cpus())
    return DataLoader(
        dataset,  # type: ignore[arg-type]
        sampler=order,
        batch_size=None,
        num_workers=loader_workers,
        persistent_workers=loader_workers > 0,
        pin_memory=device.type == "cuda",
    )
