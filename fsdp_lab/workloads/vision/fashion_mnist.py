"""Fashion-MNIST: 70,000 grey images of clothes, 28x28, downloaded if that is allowed."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from fsdp_lab.config.errors import UserError
from fsdp_lab.storage.locks import InUse, exclusive
from fsdp_lab.workloads.vision.images import Images

_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_REMEDY = "set data.root to the folder that holds FashionMNIST/raw, or use data=digits, which needs no files"
_DOWNLOAD_TIMEOUT_S = 30.0
_DOWNLOAD_WAIT_S = 900.0


class FashionMnist(Images):
    """The published training or test images.

    Args:
        split: `train` or `val`, which is the published test split.
        root: the folder that holds `FashionMNIST/raw`.
        download: download missing files. Trials on one node wait for each other.
        image_size: height and width; null: 28.

    Raises:
        UserError: files are missing and cannot be downloaded.
    """

    shape, num_classes = (1, 28), 10
    class_names = ("T-shirt", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Boot")

    def __init__(
        self, split: str, *, root: str = "outputs/data", download: bool = True, image_size: int | None = None
    ) -> None:
        from torchvision.datasets import FashionMNIST

        _prepare(root, download)
        part = FashionMNIST(root, train=split == "train")
        super().__init__(part.data.unsqueeze(1), part.targets.long(), image_size)

    @staticmethod
    def check_files(root: str = "outputs/data", download: bool = True, **_: Any) -> None:
        """Check that no file is missing, unless the first worker of a node downloads it.

        Raises:
            UserError: a file is missing and may not be downloaded, or not to this folder.
        """
        if (missing := _missing(root)) is None:
            return
        if not download:
            raise UserError(
                f"{missing}{_REMEDY}, or set data.download=true with internet access (data.download=false)."
            )
        there = next(path for path in [Path(root).absolute(), *Path(root).absolute().parents] if path.exists())
        if not there.is_dir() or not os.access(there, os.W_OK):
            raise UserError(f"{missing}{_REMEDY}: they cannot be downloaded to {there}, which cannot be written.")


def _prepare(root: str, download: bool) -> None:
    if (missing := _missing(root)) is None:
        return
    reason = "data.download=false"
    if download:
        from torchvision.datasets import FashionMNIST

        before = socket.getdefaulttimeout()
        socket.setdefaulttimeout(_DOWNLOAD_TIMEOUT_S)  # torchvision sets none: a dead mirror would hang
        try:
            with exclusive(Path(root, ".download.lock"), _DOWNLOAD_WAIT_S):  # trials side by side
                FashionMNIST(root, download=True)
            return
        except (OSError, RuntimeError, InUse) as error:
            reason = f"the download failed: {error}"
        finally:
            socket.setdefaulttimeout(before)
    raise UserError(f"{missing}{_REMEDY} ({reason}).")


def _missing(root: str) -> str | None:
    """Return a sentence that names the files missing in `root`; None if all exist."""
    folder = Path(root).absolute() / "FashionMNIST" / "raw"
    missing = [name for name in _FILES if not (folder / name).is_file()]
    if not missing:
        return None
    return f"data.root={root}: {folder} lacks Fashion-MNIST's {', '.join(missing)}; "
