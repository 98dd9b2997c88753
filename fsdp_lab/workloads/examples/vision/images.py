"""Labelled images, held in memory as bytes and served as a model takes them."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:  # a command checks its arguments without PyTorch
    from torch import Tensor

ImageBatch = tuple["Tensor", "Tensor"]


class Images:
    """A split of labelled images. Image i is `images[i % P]`: P = N except for synthetic ones.

    Items are `(image, label)`: images are float32 `(C, S, S)` in [-1, 1], labels int64. C is the channels of the data
    set; the task expands them to the model's on the device.

    Args:
        images: uint8 `(P, C, H, W)`.
        labels: int64 `(N,)`.
        image_size: S; None: as they are.
    """

    shape: ClassVar[tuple[int, int]]  # channels, and height and width, known without reading
    num_classes: ClassVar[int]
    input_kind = "images"

    def __init__(self, images: Tensor, labels: Tensor, image_size: int | None = None) -> None:
        self.images, self.labels, self.image_size = images, labels, image_size

    @classmethod
    def example_batch(
        cls, size: int, *, image_size: int | None = None, num_channels: int | None = None, **_: Any
    ) -> ImageBatch:
        import torch

        channels, height = num_channels or cls.shape[0], image_size or cls.shape[1]
        return torch.empty(size, channels, height, height), torch.empty(size, dtype=torch.int64)

    @classmethod
    def least_num_classes(cls, *, num_classes: int | None = None, **_: Any) -> int:
        return num_classes or cls.num_classes

    @property
    def digest(self) -> str:
        """16 digits that differ if a shape, a pixel or a label does."""
        sha = hashlib.sha256()
        for tensor in (self.images, self.labels):
            sha.update(str(tuple(tensor.shape)).encode())
            sha.update(tensor.contiguous().numpy().data)
        return sha.hexdigest()[:16]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> ImageBatch:
        if not 0 <= index < len(self):
            raise IndexError(f"image {index} of {len(self)}")
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[ImageBatch]:
        """Return items, scaled and resized together."""
        from torch.nn.functional import interpolate

        at = self.labels.new_tensor(indices)
        images = self.images[at % len(self.images)].float().div_(127.5).sub_(1.0)
        size = self.image_size
        if size is not None and images.shape[-1] != size:
            images = interpolate(images, size=(size, size), mode="bilinear", align_corners=False)
        return list(zip(images, self.labels[at], strict=True))
