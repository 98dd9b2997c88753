"""The model and the data set that a trial trains."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Optional  # OmegaConf reads this on every Python that this project supports

from fsdp_lab.config.errors import CombinationError, ConfigError
from fsdp_lab.config.key import Between, Memory, at_least_one, divisors, key, not_negative
from fsdp_lab.config.registry import module_of


@dataclass
class ModelConfig:
    """An image classifier. `family` is a name of the registry; `patch_size`, `num_heads` and `mlp_dim` belong to the
    ViT family only."""

    family: str = key("vit", named_by_option=True)
    image_size: int = key(28, at_least_one)
    num_channels: int = key(1, at_least_one)
    patch_size: Optional[int] = key(7, at_least_one)
    num_layers: int = key(4, at_least_one)
    num_heads: Optional[int] = key(2, at_least_one)
    hidden_dim: int = key(64, at_least_one)
    mlp_dim: Optional[int] = key(128, at_least_one)
    num_classes: int = key(10, at_least_one)

    def check(self) -> None:
        """
        Raises:
            ConfigError: the family is not registered, or a size that a ViT needs is null.
            CombinationError: sizes that do not divide each other.
        """
        module_of("model.family", self.family)
        if self.family != "vit":
            return
        for name in ("patch_size", "num_heads", "mlp_dim"):
            if getattr(self, name) is None:
                raise ConfigError(f"model.{name}=null: a ViT needs it; give model.{name} a number.")
        assert self.patch_size and self.num_heads
        if self.image_size % self.patch_size:
            raise CombinationError(
                f"model.patch_size={self.patch_size} does not divide model.image_size={self.image_size}; "
                f"use one of {divisors(self.image_size)}.",
                keys=("model.patch_size", "model.image_size"),
            )
        if self.hidden_dim % self.num_heads:
            raise CombinationError(
                f"model.num_heads={self.num_heads} does not divide model.hidden_dim={self.hidden_dim}; "
                f"use one of {divisors(self.hidden_dim)}.",
                keys=("model.num_heads", "model.hidden_dim"),
            )


_FASHION_MNIST_FILES = (
    "train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte",
)  # fmt: skip


@dataclass
class DataConfig:
    """`name` is one of the registry. `num_train`/`num_val`: use only the first so many samples; null takes all there
    are. `loader_workers` null: 0 on a CPU; on a GPU one for each core of the worker but one, 4 at most.
    """

    name: str = key("digits", named_by_option=True, memory=Memory.VALUE)
    root: str = key("outputs/data")
    download: bool = key(True)
    num_train: Optional[int] = key(None, at_least_one)
    num_val: Optional[int] = key(None, at_least_one)
    loader_workers: Optional[int] = key(None, not_negative, may_differ=Between.CHECKPOINT, before_null=0)

    def check(self) -> None:
        """
        Raises:
            ConfigError: the data set is not registered.
        """
        module_of("data.name", self.name)

    def missing(self) -> str | None:
        """Say which files of the data set are not in `root`; None when all are there or none are needed."""
        if self.name != "fashion_mnist":
            return None
        folder = Path(self.root).absolute() / "FashionMNIST" / "raw"
        missing = [name for name in _FASHION_MNIST_FILES if not (folder / name).is_file()]
        if not missing:
            return None
        return (
            f"data.root={self.root}: looked for Fashion-MNIST in {folder} and did not find {', '.join(missing)}; "
            "point data.root at the folder that holds FashionMNIST/raw, allow data.download=true where there is "
            "internet, or use data=digits, which needs no files."
        )
