"""The model, the data set and the task that a trial trains: ours by sizes, the user's by `_target_` and arguments."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional  # OmegaConf reads this on every Python that this project supports

from fsdp_lab.config.convert import from_dict
from fsdp_lab.config.errors import CombinationError, ConfigError, UserError
from fsdp_lab.config.key import Between, Memory, at_least_one, divisors, key, not_negative, positive
from fsdp_lab.config.open import OpenGroup
from fsdp_lab.config.registry import module_of
from fsdp_lab.config.source import ModelSource
from fsdp_lab.config.target import (
    argument,
    check_arguments,
    check_loss,
    check_nested,
    import_callable,
    import_object,
    instantiate,
    nested,
)

DATA_FILE = "fsdp_lab.json"  # beside an exported model of a format of its own: the data that it was trained on
EXAMPLE_BATCH = "model.example_batch"  # the target of `data=example`: the batches are the model's own


@dataclass
class ModelGroup:
    """The group `model`: one of our models (`ModelConfig`) or the user's (`UserModel`)."""

    @classmethod
    def of_plain(cls, values: dict[str, Any], prefix: str = "model.") -> ModelGroup:
        """Return the model that plain values describe: the user's if they have a `_target_`.

        Args:
            values: key -> plain value.
            prefix: the group's dotted path, for messages.

        Raises:
            ConfigError: an unknown key, or a value of another type.
        """
        return UserModel.of_keys(values, prefix) if "_target_" in values else from_dict(ModelConfig, values, prefix)

    def check(self) -> None:
        """Check the values that are wrong alone, and sizes that do not fit each other.

        Raises:
            ConfigError: with the key and the remedy.
        """
        raise NotImplementedError

    def check_files(self) -> None:
        """Check that the files that the model needs are on this machine.

        Raises:
            UserError: a file is missing or does not fit the model.
        """

    def vocab_size(self) -> int | None:
        """Return the number of tokens that the model knows; None if it takes none, or the number is not known."""
        return None

    def paths(self) -> list[str]:
        """Return the dotted paths to the user's code."""
        return []


@dataclass
class DataGroup:
    """The group `data`: one of our data sets (`DataConfig`) or the user's (`UserData`)."""

    @classmethod
    def of_plain(cls, values: dict[str, Any], prefix: str = "data.") -> DataGroup:
        """Return the data set that plain values describe: the user's if they have a `_target_`.

        Args:
            values: key -> plain value.
            prefix: the group's dotted path, for messages.

        Raises:
            ConfigError: an unknown key, or a value of another type.
        """
        return UserData.of_keys(values, prefix) if "_target_" in values else from_dict(DataConfig, values, prefix)

    @property
    def name(self) -> str:
        """The name of the data set, for people."""
        raise NotImplementedError

    @property
    def num_train(self) -> int | None:
        """Use only the first so many training samples; None: all."""
        raise NotImplementedError

    @property
    def num_val(self) -> int | None:
        """Use only the first so many validation samples; None: all."""
        raise NotImplementedError

    @property
    def loader_workers(self) -> int | None:
        """Loader processes of each worker; None: see `config.machine.loader_workers_of`."""
        raise NotImplementedError

    @property
    def download(self) -> bool:
        """Whether missing files may be downloaded."""
        return True

    def check(self) -> None:
        """Check the values that are wrong alone.

        Raises:
            ConfigError: with the key and the remedy.
        """
        raise NotImplementedError

    def missing(self) -> str | None:
        """Return a sentence that names the missing files; None if all exist, or that is not known."""
        return None

    def check_files(self) -> None:
        """Check that the files that the data need are on this machine.

        Raises:
            UserError: a file is missing.
        """

    def least_vocab_size(self) -> int | None:
        """Return the number of tokens that a model must know; None if that is not known."""
        return None

    def paths(self) -> list[str]:
        """Return the dotted paths to the user's code."""
        return []


@dataclass
class ModelConfig(ModelGroup):
    """An image classifier of ours. `patch_size`, `num_heads` and `mlp_dim` belong to the ViT family only."""

    family: str = key("vit", named_by_option=True)
    """Architecture."""
    image_size: int = key(28, at_least_one)
    """Height and width of an image, in pixels."""
    num_channels: int = key(1, at_least_one)
    """Channels of an image."""
    patch_size: Optional[int] = key(7, at_least_one)
    """Height and width of a ViT's patch; divides `image_size`."""
    num_layers: int = key(4, at_least_one)
    """Blocks."""
    num_heads: Optional[int] = key(2, at_least_one)
    """Attention heads of a ViT; divides `hidden_dim`."""
    hidden_dim: int = key(64, at_least_one)
    """Width of the model."""
    mlp_dim: Optional[int] = key(128, at_least_one)
    """Width of a ViT block's MLP."""
    num_classes: int = key(10, at_least_one)
    """Number of classes."""

    def check(self) -> None:
        """Check that the family is registered and the sizes of a ViT divide each other.

        Raises:
            ConfigError: the family is not registered, or a size that a ViT needs is null.
            CombinationError: sizes that do not divide each other.
        """
        module_of("model.family", self.family)
        if self.family != "vit":
            return
        for name in ("patch_size", "num_heads", "mlp_dim"):
            if getattr(self, name) is None:
                raise ConfigError(f"model.{name}=null: a ViT needs it; set model.{name} to a number.")
        assert self.patch_size and self.num_heads
        if self.image_size % self.patch_size:
            raise CombinationError(
                f"model.patch_size={self.patch_size} does not divide model.image_size={self.image_size}; "
                f"use one of {divisors(self.image_size)}.",
            )
        if self.hidden_dim % self.num_heads:
            raise CombinationError(
                f"model.num_heads={self.num_heads} does not divide model.hidden_dim={self.hidden_dim}; "
                f"use one of {divisors(self.hidden_dim)}.",
            )


_FASHION_MNIST_FILES = (
    "train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte",
)  # fmt: skip


@dataclass
class UserModel(ModelGroup, OpenGroup):
    """The user's module: `target` is called with `arguments`."""

    target: Optional[str] = key(None, named="_target_")
    """Import path of your callable that returns an nn.Module."""
    arguments: dict[str, Any] = key(dict)
    """Every other key below `model`: an argument of the callable."""
    block_classes: Optional[list[str]] = key(None)
    """Paths to the classes that `per_block` shards; null: found from the module."""
    flops_per_unit: Optional[float] = key(None, positive)
    """FLOPs of a forward and backward pass on one sample or token, for MFU; null: counted."""

    def check(self) -> None:
        """Check the paths and arguments against the user's code.

        Raises:
            ConfigError: a path cannot be imported, or the target does not take the arguments.
        """
        function = self.function()
        check_arguments(function, needed_target(self.target, "model"), "model", self.arguments)
        check_nested(self.arguments, "model")
        if isinstance(function, ModelSource):
            function.check(**self.arguments)
        for path in self.block_classes or ():
            if not isinstance(import_object(path, "model.block_classes"), type):
                raise ConfigError(f"model.block_classes={path} is not a class; name the class of the repeated block.")

    def function(self) -> Any:
        """Return the callable that `_target_` names."""
        return import_callable(needed_target(self.target, "model"), "model._target_")

    def check_files(self) -> None:
        """Check the files of a `ModelSource`; any other callable is not asked.

        Raises:
            UserError: see `ModelSource.check_files`.
        """
        if (source := source_of(self)) is not None:
            source.check_files(**self.arguments)

    def vocab_size(self) -> int | None:
        """Return the vocabulary size of a `ModelSource`, else the argument `vocab_size`; None if neither is known."""
        function = self.function()
        if isinstance(function, ModelSource):
            return function.vocab_size(**self.arguments)
        size = argument(function, self.arguments, "vocab_size")
        return size if isinstance(size, int) else None

    def paths(self) -> list[str]:
        """Return the dotted paths of the target, of nested targets and of the block classes."""
        inner = (str(value["_target_"]) for _, value in nested(self.arguments, "model"))
        return [path for path in (self.target, *inner, *(self.block_classes or ())) if path]


@dataclass
class DataConfig(DataGroup):
    """One of our image data sets."""

    name: str = key("digits", named_by_option=True, memory=Memory.VALUE)
    """Data set."""
    root: str = key("outputs/data")
    """Folder of the data set's files."""
    download: bool = key(True)
    """Download files that are missing."""
    num_train: Optional[int] = key(None, at_least_one)
    """Use only the first so many training samples; null: all."""
    num_val: Optional[int] = key(None, at_least_one)
    """Use only the first so many validation samples; null: all."""
    loader_workers: Optional[int] = key(None, not_negative, may_differ=Between.CHECKPOINT)
    """Loader processes of each worker; null: 0 on a CPU, on a GPU the worker's cores minus one, at most 4."""

    def check(self) -> None:
        """Check the name of the data set.

        Raises:
            ConfigError: it is not registered.
        """
        module_of("data.name", self.name)

    def missing(self) -> str | None:
        """Return a sentence that names the files missing in `root`; None if all exist or none are needed."""
        if self.name != "fashion_mnist":
            return None
        folder = Path(self.root).absolute() / "FashionMNIST" / "raw"
        missing = [name for name in _FASHION_MNIST_FILES if not (folder / name).is_file()]
        if not missing:
            return None
        return (
            f"data.root={self.root}: {folder} lacks Fashion-MNIST's {', '.join(missing)}; set data.root to the folder "
            "that holds FashionMNIST/raw, set data.download=true with internet access, or use data=digits, which "
            "needs no files."
        )


@dataclass
class UserData(DataGroup, OpenGroup):
    """The user's data set: `target` is called with `arguments` and `split="train"`, then `split="val"`.

    The target may have two static methods. An error that `check_files(**arguments)` raises is reported before Ray
    starts; `least_vocab_size(**arguments)` returns the number of tokens that a model must know.
    """

    target: Optional[str] = key(None, named="_target_", memory=Memory.VALUE)
    """Import path of your callable that returns a map-style data set."""
    arguments: dict[str, Any] = key(dict, memory=Memory.VALUE)
    """Every other key below `data`: an argument of the callable."""
    collate_fn: Optional[str] = key(None, memory=Memory.VALUE)
    """Import path of a function that makes a batch from a list of items; null: PyTorch's default_collate."""
    num_train: Optional[int] = key(None, at_least_one)
    """Use only the first so many training samples; null: all."""
    num_val: Optional[int] = key(None, at_least_one)
    """Use only the first so many validation samples; null: all."""
    loader_workers: Optional[int] = key(None, not_negative, may_differ=Between.CHECKPOINT)
    """As for our data."""

    @property
    def name(self) -> str:
        """The dotted path of the target; "" without one."""
        return self.target or ""

    def check(self) -> None:
        """Check the paths and arguments against the user's code.

        Raises:
            ConfigError: a path cannot be imported, or the target does not take the arguments.
        """
        target = needed_target(self.target, "data")
        if target != EXAMPLE_BATCH:
            function = import_callable(target, "data._target_")
            check_arguments(function, target, "data", self.arguments, given=("split",))
            check_nested(self.arguments, "data")
        if self.collate_fn is not None:
            import_callable(self.collate_fn, "data.collate_fn")

    def check_files(self) -> None:
        """Call the target's `check_files`, if it has one.

        Raises:
            UserError: it raised an error.
        """
        target = needed_target(self.target, "data")
        if target == EXAMPLE_BATCH or not hasattr(function := import_callable(target, "data._target_"), "check_files"):
            return
        try:
            function.check_files(**instantiate(self.arguments, "data"))
        except UserError:  # our own data sets say it in one message
            raise
        except Exception as error:
            raise UserError(f"data._target_={target}: {type(error).__name__}: {error}") from error

    def least_vocab_size(self) -> int | None:
        """Return what the target's `least_vocab_size` returns; None without one."""
        target = needed_target(self.target, "data")
        function = None if target == EXAMPLE_BATCH else import_callable(target, "data._target_")
        ask = getattr(function, "least_vocab_size", None)
        return None if ask is None else ask(**instantiate(self.arguments, "data"))

    def paths(self) -> list[str]:
        """Return the dotted paths of the target, of nested targets and of `collate_fn`."""
        inner = (str(value["_target_"]) for _, value in nested(self.arguments, "data"))
        return [path for path in (self.target, *inner, self.collate_fn) if path and path != EXAMPLE_BATCH]


def source_of(model: ModelGroup) -> ModelSource | None:
    """Return the `ModelSource` that a model's target names; None for any other model."""
    function = model.function() if isinstance(model, UserModel) and model.target else None
    return function if isinstance(function, ModelSource) else None


def known_vocab_size(values: dict[str, Any]) -> int | None:
    """Return the number of tokens that a model knows whose configuration is in a file; None for other models.

    Args:
        values: the values of the group `model`.

    Raises:
        UserError: the file cannot be read.
    """
    model = ModelGroup.of_plain(values)
    return None if source_of(model) is None else model.vocab_size()


def needed_target(target: str | None, group: str) -> str:
    """Return the target of a group.

    Args:
        target: of the group; None: not given.
        group: `model` or `data`, for the message.

    Raises:
        ConfigError: the target is None.
    """
    if target is None:
        raise ConfigError(f"{group}=custom: {group}._target_ is not set; write package.module.name.")
    return target


def _is_unit(value: str) -> str | None:
    """Take `samples` or `tokens`."""
    return None if value in ("samples", "tokens") else "is not a unit; use samples or tokens"


@dataclass
class TaskConfig:
    """The task that a model learns from a batch."""

    name: str = key("classification", named_by_option=True, memory=Memory.VALUE)
    """Task."""
    loss: Optional[str] = key(None, memory=Memory.VALUE)
    """For `custom`: path to `f(model, batch)` that returns the mean loss, a scalar."""
    metrics: Optional[str] = key(None)
    """For `custom`: path to `f(model, batch)` that returns `{name: (sum, count)}` in validation."""
    unit: Optional[str] = key(None, _is_unit)
    """What speed counts: `samples` or `tokens`; null: the task's own."""
    loss_chunks: int = key(1, at_least_one, memory=Memory.VALUE)
    """For `language`: compute the loss in so many parts of the sequence, which hold fewer logits at once."""

    def check(self) -> None:
        """Check the name, the loss and the metrics of the task.

        Raises:
            ConfigError: the task is not registered, or a path cannot be imported.
            CombinationError: `loss` is given to a task that has its own, or missing in one that needs it.
        """
        module_of("task.name", self.name)
        if (self.name == "custom") != (self.loss is not None):
            raise CombinationError(
                f"task={self.name} with task.loss={self.loss or 'null'}: task=custom takes its loss from task.loss, "
                "the other tasks have their own; give both, or neither.",
            )
        if self.loss_chunks > 1 and self.name != "language":
            raise CombinationError(
                f"task.loss_chunks={self.loss_chunks} with task={self.name}: only task=language computes its loss in "
                "parts; use task.loss_chunks=1.",
            )
        for name in ("loss", "metrics"):
            if path := getattr(self, name):
                check_loss(path, f"task.{name}")

    def paths(self) -> list[str]:
        """Return the dotted paths of the loss and the metrics."""
        return [path for path in (self.loss, self.metrics) if path]
