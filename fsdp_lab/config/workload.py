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
    """What stands under `model`: a `ModelConfig` of ours, or a `UserModel`."""

    @classmethod
    def of_plain(cls, values: dict[str, Any], prefix: str = "model.") -> ModelGroup:
        """Return the model that plain values describe: the user's where they have a `_target_`.

        Raises:
            ConfigError: an unknown key, or a value of another type.
        """
        return UserModel.of_keys(values, prefix) if "_target_" in values else from_dict(ModelConfig, values, prefix)

    def check(self) -> None:
        """
        Raises:
            ConfigError: a value that is wrong alone.
        """
        raise NotImplementedError

    def check_files(self) -> None:
        """
        Raises:
            UserError: files that are needed are not on this machine, or do not fit the model.
        """

    def vocab_size(self) -> int | None:
        """Return how many tokens the model knows; None where it takes none, or that is not known."""
        return None

    def paths(self) -> list[str]:
        """Return the dotted paths to the user's code."""
        return []


@dataclass
class DataGroup:
    """What stands under `data`: a `DataConfig` of ours, or a `UserData`."""

    @classmethod
    def of_plain(cls, values: dict[str, Any], prefix: str = "data.") -> DataGroup:
        """As `ModelGroup.of_plain`."""
        return UserData.of_keys(values, prefix) if "_target_" in values else from_dict(DataConfig, values, prefix)

    @property
    def name(self) -> str:
        """What the data set is called before people."""
        raise NotImplementedError

    @property
    def num_train(self) -> int | None:
        raise NotImplementedError

    @property
    def num_val(self) -> int | None:
        raise NotImplementedError

    @property
    def loader_workers(self) -> int | None:
        raise NotImplementedError

    @property
    def download(self) -> bool:
        """Whether what is missing may be downloaded."""
        return True

    def check(self) -> None:
        """
        Raises:
            ConfigError: a value that is wrong alone.
        """
        raise NotImplementedError

    def missing(self) -> str | None:
        """Say which files are not there; None when all are, or nothing is known of them."""
        return None

    def check_files(self) -> None:
        """
        Raises:
            UserError: files that are needed are not on this machine.
        """

    def least_vocab_size(self) -> int | None:
        """Return how many tokens a model must know; None where that is not known."""
        return None

    def paths(self) -> list[str]:
        """Return the dotted paths to the user's code."""
        return []


@dataclass
class ModelConfig(ModelGroup):
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
class UserModel(ModelGroup, OpenGroup):
    """A module of the user's: `target` is called with `arguments`.

    `block_classes`: paths to what `per_block` shards; null: found from the module. `flops_per_unit`: of a forward and
    backward pass; null: counted.
    """

    target: Optional[str] = key(None, named="_target_")
    arguments: dict[str, Any] = key(dict)
    block_classes: Optional[list[str]] = key(None)
    flops_per_unit: Optional[float] = key(None, positive)

    def check(self) -> None:
        """
        Raises:
            ConfigError: a path that cannot be imported, or arguments that the target does not take.
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
        """Return what the target names."""
        return import_callable(needed_target(self.target, "model"), "model._target_")

    def check_files(self) -> None:
        if (source := source_of(self)) is not None:
            source.check_files(**self.arguments)

    def vocab_size(self) -> int | None:
        function = self.function()
        if isinstance(function, ModelSource):
            return function.vocab_size(**self.arguments)
        size = argument(function, self.arguments, "vocab_size")
        return size if isinstance(size, int) else None

    def paths(self) -> list[str]:
        inner = (str(value["_target_"]) for _, value in nested(self.arguments, "model"))
        return [path for path in (self.target, *inner, *(self.block_classes or ())) if path]


@dataclass
class DataConfig(DataGroup):
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


@dataclass
class UserData(DataGroup, OpenGroup):
    """A data set of the user's: `target` is called with `arguments` and `split="train"`, then `split="val"`.

    `collate_fn`: a path to what makes a batch of a list of items; null: PyTorch's `default_collate`. The other keys are
    as in `DataConfig`. Where the target has a static method `check_files(**arguments)`, an error that it raises is told
    before Ray starts; `least_vocab_size(**arguments)` says how many tokens a model must know.
    """

    target: Optional[str] = key(None, named="_target_", memory=Memory.VALUE)
    arguments: dict[str, Any] = key(dict, memory=Memory.VALUE)
    collate_fn: Optional[str] = key(None, memory=Memory.VALUE)
    num_train: Optional[int] = key(None, at_least_one)
    num_val: Optional[int] = key(None, at_least_one)
    loader_workers: Optional[int] = key(None, not_negative, may_differ=Between.CHECKPOINT)

    @property
    def name(self) -> str:
        return self.target or ""

    def check(self) -> None:
        """
        Raises:
            ConfigError: a path that cannot be imported, or arguments that the target does not take.
        """
        target = needed_target(self.target, "data")
        if target != EXAMPLE_BATCH:
            function = import_callable(target, "data._target_")
            check_arguments(function, target, "data", self.arguments, given=("split",))
            check_nested(self.arguments, "data")
        if self.collate_fn is not None:
            import_callable(self.collate_fn, "data.collate_fn")

    def check_files(self) -> None:
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
        target = needed_target(self.target, "data")
        function = None if target == EXAMPLE_BATCH else import_callable(target, "data._target_")
        ask = getattr(function, "least_vocab_size", None)
        return None if ask is None else ask(**instantiate(self.arguments, "data"))

    def paths(self) -> list[str]:
        inner = (str(value["_target_"]) for _, value in nested(self.arguments, "data"))
        return [path for path in (self.target, *inner, self.collate_fn) if path and path != EXAMPLE_BATCH]


def source_of(model: ModelGroup) -> ModelSource | None:
    """Return what a model's target names where that is a `ModelSource`."""
    function = model.function() if isinstance(model, UserModel) and model.target else None
    return function if isinstance(function, ModelSource) else None


def known_vocab_size(values: dict[str, Any]) -> int | None:
    """Return how many tokens a model knows whose configuration is in a file; None for others.

    Args:
        values: what stands under `model`.

    Raises:
        UserError: the file cannot be read.
    """
    model = ModelGroup.of_plain(values)
    return None if source_of(model) is None else model.vocab_size()


def needed_target(target: str | None, group: str) -> str:
    """
    Raises:
        ConfigError: there is none.
    """
    if target is None:
        raise ConfigError(f"{group}=custom: {group}._target_ names nothing; give it as package.module.name.")
    return target


def _is_unit(value: str) -> str | None:
    return None if value in ("samples", "tokens") else "is not a unit; use samples or tokens"


@dataclass
class TaskConfig:
    """What a model learns from a batch. `name` is one of the registry.

    For `custom`: `loss` is a path to `f(model, batch)`, which returns the mean loss, a scalar; `metrics` one to
    `f(model, batch)`, which returns `{name: (sum, count)}` in validation. `unit`: what is counted; null: the task's.
    `loss_chunks`: for `language`, in how many parts of the sequence a model computes the loss by itself.
    """

    name: str = key("classification", named_by_option=True, memory=Memory.VALUE)
    loss: Optional[str] = key(None, memory=Memory.VALUE)
    metrics: Optional[str] = key(None)
    unit: Optional[str] = key(None, _is_unit)
    loss_chunks: int = key(1, at_least_one, memory=Memory.VALUE)

    def check(self) -> None:
        """
        Raises:
            ConfigError: the task is not registered, or a path cannot be imported.
            CombinationError: a loss for a task that has one, or none for one that needs it.
        """
        module_of("task.name", self.name)
        if (self.name == "custom") != (self.loss is not None):
            raise CombinationError(
                f"task={self.name} with task.loss={self.loss or 'null'}: task=custom takes its loss from task.loss, "
                "the other tasks have their own; give both, or neither.",
                keys=("task", "task.loss"),
            )
        if self.loss_chunks > 1 and self.name != "language":
            raise CombinationError(
                f"task.loss_chunks={self.loss_chunks} with task={self.name}: only task=language computes its loss in "
                "parts; use task.loss_chunks=1.",
                keys=("task", "task.loss_chunks"),
            )
        for name in ("loss", "metrics"):
            if path := getattr(self, name):
                check_loss(path, f"task.{name}")

    def paths(self) -> list[str]:
        return [path for path in (self.loss, self.metrics) if path]
