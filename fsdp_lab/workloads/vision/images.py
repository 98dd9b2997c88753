"""Labelled images, held in memory as bytes and served in batches."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_lab.config.errors import ConfigError
from fsdp_lab.config.workload import DataConfig, ModelConfig
from fsdp_lab.workloads.base import Data, DataSpec

ImageBatch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Split:
    """Labelled images. Image i is `images[i % P]`: P = N except for synthetic ones.

    Attributes:
        images: uint8 `(P, C, H, W)`.
        labels: int64 `(N,)`.
    """

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def first(self, count: int | None) -> Split:
        """Return the first so many samples; None: all."""
        return Split(self.images[:count], self.labels[:count])


def _nothing_to_prepare() -> None:
    """Do nothing: the default of a source without files."""


@dataclass(frozen=True)
class ImageSource:
    """A data set of images.

    Attributes:
        image_shape: channels, height and width, known without reading.
        num_classes: classes of the labels.
        read: returns the training and the validation split.
        prepare: downloads missing files.
        class_names: for pictures; None: the classes are numbers.
    """

    image_shape: tuple[int, int, int]
    num_classes: int
    read: Callable[[], tuple[Split, Split]]
    prepare: Callable[[], None] = _nothing_to_prepare
    class_names: tuple[str, ...] | None = None


def image_data(source: ImageSource, data: DataConfig, model: ModelConfig) -> DataSpec:
    """Return a data spec that serves a source's images as the model takes them.

    Args:
        source: of the images.
        data: how many samples to use.
        model: its image size and classes.
    """

    def load() -> Data:
        train, val = source.read()
        if source.num_classes > model.num_classes:
            raise ConfigError(
                f"model.num_classes={model.num_classes} is less than the {source.num_classes} classes of "
                f"data={data.name}; use model.num_classes={source.num_classes}."
            )
        train, val = train.first(data.num_train), val.first(data.num_val)
        return Data(ImageDataset(train, model), ImageDataset(val, model), digest(train, val))

    def example_batch(size: int) -> ImageBatch:
        images = preprocess(torch.empty((size, *source.image_shape), dtype=torch.uint8), model)
        return images, torch.empty(size, dtype=torch.int64)

    return DataSpec(source.prepare, load, example_batch)


class ImageDataset:
    """Whole batches by the indices of their items, scaled and resized.

    An item is `(images, labels)`: images are float32 `(B, C, S, S)` in [-1, 1], labels int64 `(B,)`. C is the channels
    of the data set; `expand_channels` makes the model's from them on the device. An index of -1 is padding with the
    label -1.

    Args:
        split: the images.
        model: its `image_size` is S.
    """

    def __init__(self, split: Split, model: ModelConfig) -> None:
        self.split, self.model = split, model

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, indices: Tensor) -> ImageBatch:
        images = preprocess(self.split.images[indices % len(self.split.images)], self.model)
        return images, torch.where(indices < 0, -1, self.split.labels[indices])


def preprocess(images: Tensor, model: ModelConfig) -> Tensor:
    """Return images uint8 `(B, C, H, W)` as float32 `(B, C, S, S)` in [-1, 1], with S the model's `image_size`."""
    images = images.float().div_(127.5).sub_(1.0)
    size = model.image_size
    if images.shape[-1] != size:
        images = F.interpolate(images, size=(size, size), mode="bilinear", align_corners=False)
    return images


def expand_channels(images: Tensor, model: ModelConfig) -> Tensor:
    """Return images `(B, 1 or C, S, S)` as `(B, model.num_channels, S, S)`; a grey image becomes a view per channel.

    Called after the copy to the device: a view with a stride of 0 cannot be pinned, and would be copied channel by
    channel.
    """
    return images.expand(-1, model.num_channels, -1, -1)


def digest(*splits: Split) -> str:
    """Return a SHA-256 over shapes, pixels and labels, shortened to 16 digits; MLflow keeps 36."""
    sha = hashlib.sha256()
    for split in splits:
        for tensor in (split.images, split.labels):
            sha.update(str(tuple(tensor.shape)).encode())
            sha.update(tensor.contiguous().numpy().data)
    return sha.hexdigest()[:16]
