"""scikit-learn's 1,797 handwritten digits: grey, 8x8."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_lab.workloads.examples.vision.images import Images

if TYPE_CHECKING:
    from torch import Tensor

_SPLIT_SEED = 0  # fixed, so that the validation images are the same in every run


class Digits(Images):
    """The training or the validation split, 80/20, the same each time.

    Args:
        split: `train` or `val`.
        image_size: height and width; null: 8.
    """

    shape, num_classes = (1, 8), 10

    def __init__(self, split: str, *, image_size: int | None = None) -> None:
        import torch

        images, labels = read_digits()
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(_SPLIT_SEED))
        cut = len(order) * 4 // 5
        chosen = order[:cut] if split == "train" else order[cut:]
        super().__init__(images[chosen], labels[chosen], image_size)


def read_digits() -> tuple[Tensor, Tensor]:
    """Return all images uint8 `(N, 1, 8, 8)` and labels int64 `(N,)`.

    Reads the file that scikit-learn installs: importing its `datasets` takes longer than an epoch.
    """
    import numpy as np
    import torch

    spec = importlib.util.find_spec("sklearn")
    assert spec is not None and spec.origin is not None
    table = Path(spec.origin).with_name("datasets") / "data" / "digits.csv.gz"
    values = torch.from_numpy(np.loadtxt(table, delimiter=",", dtype=np.int64))
    pixels, labels = values[:, :-1], values[:, -1]
    return (pixels.double() * 255 / 16).round().to(torch.uint8).view(-1, 1, 8, 8), labels
