"""Seeded noise in the shape that the model takes, for measurements in which nothing needs to be learned."""

from __future__ import annotations

import torch

from fsdp_lab.config.workload import DataConfig, ModelConfig
from fsdp_lab.workloads.vision.images import ImageSource, Split


def build_source(data: DataConfig, model: ModelConfig) -> ImageSource:
    """Return the source of the noise: 1,024 training and 128 validation samples unless `data` gives other numbers."""

    def read() -> tuple[Split, Split]:
        counts = (data.num_train or 1024, data.num_val or 128)
        train, val = (synthetic(n, model, seed) for seed, n in enumerate(counts))
        return train, val

    return ImageSource((model.num_channels, model.image_size, model.image_size), model.num_classes, read)


def synthetic(count: int, model: ModelConfig, seed: int) -> Split:
    """Return samples drawn from at most 64 different images.

    A thousand images of 224x224 would take 150 MB in every worker.

    Args:
        count: samples.
        model: its images and classes.
        seed: of the noise.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (min(count, 64), model.num_channels, model.image_size, model.image_size)
    pool = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, model.num_classes, (shape[0],), generator=generator)
    return Split(pool, labels[torch.arange(count) % shape[0]])
