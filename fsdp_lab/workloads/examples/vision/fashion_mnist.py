"""Fashion-MNIST: 70,000 grey images of clothes, 28x28, which may be downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fsdp_lab.config.errors import UserError
from fsdp_lab.storage.locks import InUse, exclusive
from fsdp_lab.workloads.examples.vision.images import Images

_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
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

    def __init__(
        self, split: str, *, root: str = "outputs/data", download: bool = True, image_size: int | None = None
    ) -> None:
        from torchvision.datasets import FashionMNIST

        self.check_files(root, download)
        if _missing(root):
            try:
                with exclusive(Path(root, ".download.lock"), _DOWNLOAD_WAIT_S):  # trials side by side
                    FashionMNIST(root, download=True)
            except (OSError, RuntimeError, InUse) as error:
                raise _error(root, f"the download failed: {error}") from error
        part = FashionMNIST(root, train=split == "train")
        super().__init__(part.data.unsqueeze(1), part.targets.long(), image_size)

    @staticmethod
    def check_files(root: str = "outputs/data", download: bool = True, **_: Any) -> None:
        """Check that no file is missing, unless the first worker of a node downloads it. Raises UserError."""
        if not download and _missing(root):
            raise _error(root, "data.download=false; true downloads them")


def _missing(root: str) -> list[str]:
    return [name for name in _FILES if not Path(root, "FashionMNIST", "raw", name).is_file()]


def _error(root: str, reason: str) -> UserError:
    return UserError(
        f"data.root={root}: {Path(root).absolute()}/FashionMNIST/raw lacks {', '.join(_missing(root))} ({reason}); set "
        "data.root to the folder that holds FashionMNIST/raw, or use data=digits, which needs no files."
    )
