"""Fashion-MNIST: 70,000 grey images of clothes, 28x28, downloaded if that is allowed."""

from __future__ import annotations

import socket
from functools import partial
from pathlib import Path

from fsdp_lab.config.errors import UserError
from fsdp_lab.config.workload import DataConfig, ModelConfig
from fsdp_lab.locks import InUse, exclusive
from fsdp_lab.workloads.vision.images import ImageSource, Split

CLASSES = ("T-shirt", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Boot")
_DOWNLOAD_TIMEOUT_S = 30.0
_DOWNLOAD_WAIT_S = 900.0


def build_source(data: DataConfig, model: ModelConfig) -> ImageSource:
    """Return the source of the images, which are read from `data.root`."""
    return ImageSource((1, 28, 28), len(CLASSES), partial(read, data), partial(prepare, data), CLASSES)


def read(data: DataConfig) -> tuple[Split, Split]:
    """Return the published training and test images."""
    from torchvision.datasets import FashionMNIST

    parts = [FashionMNIST(data.root, train=train) for train in (True, False)]
    train, val = (Split(p.data.unsqueeze(1), p.targets.long()) for p in parts)
    return train, val


def prepare(data: DataConfig) -> None:
    """Download missing files if `data.download` allows it. Trials on one node wait for each other.

    Raises:
        UserError: files are missing and cannot be downloaded.
    """
    if data.missing() is None:
        return
    reason = "data.download=false"
    if data.download:
        from torchvision.datasets import FashionMNIST

        before = socket.getdefaulttimeout()
        socket.setdefaulttimeout(_DOWNLOAD_TIMEOUT_S)  # torchvision sets none: a dead mirror would hang
        try:
            with exclusive(Path(data.root, ".download.lock"), _DOWNLOAD_WAIT_S):  # trials side by side
                FashionMNIST(data.root, download=True)
            return
        except (OSError, RuntimeError, InUse) as error:
            reason = f"the download failed: {error}"
        finally:
            socket.setdefaulttimeout(before)
    raise UserError(f"{data.missing()} ({reason})")
