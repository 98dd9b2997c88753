"""Images and labels, held in memory as bytes, served in an order that depends on seed and epoch only."""

from __future__ import annotations

import hashlib
import importlib.util
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from fsdp_lab.config.checks import missing_data_message
from fsdp_lab.config.errors import ConfigError, UserError
from fsdp_lab.config.schema import DataConfig, DataName, ModelConfig, TrainingConfig
from fsdp_lab.hardware import default_loader_workers, worker_cpus
from fsdp_lab.training.distributed import Ranks, gather

_SPLIT_SEED = 0  # of digits: fixed, so that the validation images are the same in every run
_DOWNLOAD_TIMEOUT_S = 30.0
_DOWNLOAD_WAIT_S = 900.0


@dataclass(frozen=True)
class Split:
    """`images`: uint8 (P, C, H, W); `labels`: int64 (N,). Image i is `images[i % P]`: P = N but for synthetic ones."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def first(self, count: int | None) -> Split:
        return Split(self.images[:count], self.labels[:count])


@dataclass(frozen=True)
class Data:
    train: Split
    val: Split
    num_classes: int
    digest: str


def load_data(data: DataConfig, model: ModelConfig, ranks: Ranks) -> Data:
    """Both splits. Where images are downloaded, one process of each node does it and the others wait.

    Raises:
        UserError: the images cannot be had, or have more classes than the model.
    """
    problem = ""
    if ranks.local_rank == 0:
        try:
            prepare(data)
        except UserError as error:
            problem = str(error)
    if problems := [text for text in gather(problem) if text]:
        raise UserError(problems[0])
    train, val, num_classes = read_splits(data, model)
    if num_classes > model.num_classes:
        raise ConfigError(
            f"model.num_classes={model.num_classes} is less than the {num_classes} classes of "
            f"data={data.name.name}; use model.num_classes={num_classes}."
        )
    train, val = train.first(data.num_train), val.first(data.num_val)
    return Data(train, val, num_classes, digest(train, val))


def prepare(data: DataConfig) -> None:
    """Download what is missing, where that is allowed and possible."""
    if data.name is not DataName.fashion_mnist or missing_data_message(data) is None:
        return
    reason = "data.download=false"
    if data.download:
        from filelock import FileLock  # torch's own dependency
        from torchvision.datasets import FashionMNIST

        before = socket.getdefaulttimeout()
        socket.setdefaulttimeout(_DOWNLOAD_TIMEOUT_S)  # torchvision sets none: a dead mirror would hang
        try:
            Path(data.root).mkdir(parents=True, exist_ok=True)
            with FileLock(Path(data.root, ".download.lock"), timeout=_DOWNLOAD_WAIT_S):  # trials side by side
                FashionMNIST(data.root, download=True)
            return
        except (OSError, RuntimeError) as error:  # filelock's Timeout is an OSError
            reason = f"the download failed: {error}"
        finally:
            socket.setdefaulttimeout(before)
    raise UserError(f"{missing_data_message(data)} ({reason})")


def read_splits(data: DataConfig, model: ModelConfig) -> tuple[Split, Split, int]:
    """`(train, validation, number of classes)` of the named data set."""
    match data.name:
        case DataName.digits:
            return (*read_digits(), 10)
        case DataName.fashion_mnist:
            from torchvision.datasets import FashionMNIST

            parts = [FashionMNIST(data.root, train=train) for train in (True, False)]
            train, val = (Split(p.data.unsqueeze(1), p.targets.long()) for p in parts)
            return train, val, 10
        case DataName.synthetic:
            counts = (data.num_train or 1024, data.num_val or 128)
            train, val = (synthetic(n, model, seed) for seed, n in enumerate(counts))
            return train, val, model.num_classes
        case _:
            raise ValueError(f"data.name={data.name} is not known")


def image_shape(data: DataConfig, model: ModelConfig) -> tuple[int, int, int]:
    """Channels, height and width of the images, without reading them."""
    grey = {DataName.digits: (1, 8, 8), DataName.fashion_mnist: (1, 28, 28)}
    return grey.get(data.name, (model.num_channels, model.image_size, model.image_size))


def read_digits() -> tuple[Split, Split]:
    """scikit-learn's 1,797 handwritten digits, 8x8, split 80/20 once and for all.

    Read from the file that scikit-learn installs: importing its `datasets` takes longer than an epoch.
    """
    import numpy as np

    spec = importlib.util.find_spec("sklearn")
    folders = spec.submodule_search_locations if spec else None
    table = Path(folders[0], "datasets", "data", "digits.csv.gz") if folders else None
    if table is not None and table.exists():
        values = torch.from_numpy(np.loadtxt(table, delimiter=",", dtype=np.int64))
        pixels, labels = values[:, :-1], values[:, -1]
    else:
        from sklearn.datasets import load_digits

        bunch = load_digits()
        pixels, labels = torch.from_numpy(bunch.data), torch.from_numpy(bunch.target).long()
    images = (pixels.double() * 255 / 16).round().to(torch.uint8).view(-1, 1, 8, 8)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(_SPLIT_SEED))
    train, val = order[: len(order) * 4 // 5], order[len(order) * 4 // 5 :]
    return Split(images[train], labels[train]), Split(images[val], labels[val])


def synthetic(count: int, model: ModelConfig, seed: int) -> Split:
    """Seeded noise in the shape that the model takes. At most 64 different images, seen again and again:
    what they cost is what matters, and a thousand of 224x224 would take 150 MB in every worker."""
    generator = torch.Generator().manual_seed(seed)
    shape = (min(count, 64), model.num_channels, model.image_size, model.image_size)
    pool = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, model.num_classes, (shape[0],), generator=generator)
    return Split(pool, labels[torch.arange(count) % shape[0]])


def digest(*splits: Split) -> str:
    """SHA-256 over shapes, pixels and labels, shortened to 16 digits; MLflow keeps 36."""
    sha = hashlib.sha256()
    for split in splits:
        for tensor in (split.images, split.labels):
            sha.update(str(tuple(tensor.shape)).encode())
            sha.update(tensor.contiguous().numpy().data)
    return sha.hexdigest()[:16]


class ImageDataset(Dataset[tuple[Tensor, Tensor]]):
    """Whole batches by their indices, scaled and resized.

    An item is `(images float32 (B, C, S, S) in [-1, 1], labels int64 (B,))`, with C the channels of the data set:
    `expand_channels` makes those of the model from them on the device. An index of -1 is padding and gets label -1.
    """

    def __init__(self, split: Split, model: ModelConfig) -> None:
        self.split, self.model = split, model

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        images = scale_and_resize(self.split.images[indices % len(self.split.images)], self.model)
        return images, torch.where(indices < 0, -1, self.split.labels[indices])


def scale_and_resize(images: Tensor, model: ModelConfig) -> Tensor:
    """uint8 (B, C, H, W) -> float32 (B, C, S, S) in [-1, 1]."""
    images = images.float().div_(127.5).sub_(1.0)
    size = model.image_size
    if images.shape[-1] != size:
        images = F.interpolate(images, size=(size, size), mode="bilinear", align_corners=False)
    return images


def expand_channels(images: Tensor, model: ModelConfig) -> Tensor:
    """(B, 1 or C, S, S) -> (B, model.num_channels, S, S); a grey image becomes a view in each channel.

    Done after the copy to the device: a view with a stride of 0 cannot be pinned, and would be copied channel by
    channel.
    """
    return images.expand(-1, model.num_channels, -1, -1)


class TrainOrder(Sampler[Tensor]):
    """The indices of each microbatch of this rank, through one epoch.

    An epoch is a permutation of the training images, cut into global batches; what is left over at its
    end is not used. Each global batch is cut by microbatch first and rank second, so that the images of
    an optimizer step are the same for every number of workers.
    """

    def __init__(self, count: int, training: TrainingConfig, ranks: Ranks) -> None:
        self.count, self.training, self.ranks = count, training, ranks
        self.epoch = self.steps_done = 0
        self.steps_per_epoch = count // training.global_batch_size
        if self.steps_per_epoch == 0:
            raise ConfigError(
                f"training.global_batch_size={training.global_batch_size} is more than the {count} training "
                f"images; use at most {count}."
            )

    def go_to(self, epoch: int, steps_done: int) -> None:
        """Begin after so many optimizer steps of an epoch."""
        self.epoch, self.steps_done = epoch, steps_done

    def __len__(self) -> int:
        return (self.steps_per_epoch - self.steps_done) * self.training.grad_accum_steps

    def __iter__(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(self.training.seed * 1_000_003 + self.epoch)
        order = torch.randperm(self.count, generator=generator)
        shape = (self.training.grad_accum_steps, self.ranks.world_size, -1)
        size = self.training.global_batch_size
        for step in order[self.steps_done * size : self.steps_per_epoch * size].split(size):
            yield from step.view(shape)[:, self.ranks.rank]


class ValOrder(Sampler[Tensor]):
    """Every validation image once, dealt to the ranks in turn; padded, since all ranks must step together."""

    def __init__(self, count: int, batch_size: int, ranks: Ranks) -> None:
        per_rank = -(-count // ranks.world_size)
        indices = torch.full((per_rank * ranks.world_size,), -1)
        indices[:count] = torch.arange(count)
        self.batches: Sequence[Tensor] = indices[ranks.rank :: ranks.world_size].split(batch_size)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.batches)


def build_loader(
    split: Split, order: Sampler[Tensor], data: DataConfig, model: ModelConfig, ranks: Ranks
) -> DataLoader[tuple[Tensor, Tensor]]:
    """A loader of whole microbatches: the sampler's item is the list of indices of one."""
    loader_workers = data.loader_workers
    if loader_workers is None:
        loader_workers = default_loader_workers(ranks.device.type == "cuda", worker_cpus())
    return DataLoader(
        ImageDataset(split, model),
        sampler=order,
        batch_size=None,
        num_workers=loader_workers,
        persistent_workers=loader_workers > 0,
        pin_memory=ranks.device.type == "cuda",
    )
