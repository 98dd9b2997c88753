"""scikit-learn's 1,797 handwritten digits: grey, 8x8."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

from fsdp_lab.config.workload import DataConfig, ModelConfig
from fsdp_lab.workloads.vision.images import ImageSource, Split

_SPLIT_SEED = 0  # fixed, so that the validation images are the same in every run


def build_source(data: DataConfig, model: ModelConfig) -> ImageSource:
    """Return the source of the digits. The arguments do not change it."""
    return ImageSource(image_shape=(1, 8, 8), num_classes=10, read=read_digits)


def read_digits() -> tuple[Split, Split]:
    """Return the training and the validation split, 80/20, the same each time.

    Reads the file that scikit-learn installs: importing its `datasets` takes longer than an epoch.
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
