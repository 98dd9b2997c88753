"""Seeded noise in the shape of the model's inputs, for measurements in which nothing needs to be learned."""

from __future__ import annotations

from fsdp_lab.workloads.examples.vision.images import Images

_POOL = 64  # different images: a thousand of 224x224 would take 150 MB in every worker


class SyntheticImages(Images):
    """Random images with random labels, a million in each split, of which 64 differ.

    Args:
        split: `train` or `val`.
        image_size: height and width.
    """

    shape, num_classes = (1, 28), 10

    def __init__(self, split: str, *, image_size: int = 28, num_channels: int = 1, num_classes: int = 10) -> None:
        import torch

        generator = torch.Generator().manual_seed(int(split == "val"))
        shape = (_POOL, num_channels, image_size, image_size)
        pool = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        labels = torch.randint(0, num_classes, (_POOL,), generator=generator)
        super().__init__(pool, labels[torch.arange(2**20) % _POOL])
