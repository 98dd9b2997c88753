"""The model, the data set and the task that a trial trains: a `_target_` and its arguments, ours or the user's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional  # OmegaConf reads this on every Python that this project supports

from fsdp_lab.config.errors import ConfigError, UserError
from fsdp_lab.config.key import at_least_one, key, not_negative, positive
from fsdp_lab.config.options import option_of
from fsdp_lab.config.serialize import OpenGroup
from fsdp_lab.config.target import (
    argument,
    import_callable,
    instantiate,
    nested,
    parameters,
)

COUNTING_TASKS = ("classification", "language", "seq2seq")  # the batch determines which labels count
# What tensor parallelism does with a module: see fsdp_lab/training/parallel/tensor.py.
TP_WORDS = ("colwise", "rowwise", "sequence", "loss_parallel", "colwise_gathered", "rowwise_split", "heads")
EXAMPLE_BATCH = "model.example_batch"  # the target of `data=example`: the model makes the batches


class ModelSource:
    """A callable that builds models and knows more about its arguments than a signature shows.

    Each method takes the arguments of `__call__`.

    Attributes:
        input_kind: see `KINDS` in `rules.py`; None: any.
    """

    input_kind: str | None = None

    def __call__(self, *args: Any, **arguments: Any) -> Any:
        raise NotImplementedError

    def check(self, *args: Any, **arguments: Any) -> None:
        """Check the arguments, reading nothing larger than a configuration.

        Raises:
            UserError: an argument is invalid.
        """

    def check_files(self, *args: Any, **arguments: Any) -> None:
        """Check that the files that the model needs are on this machine.

        Raises:
            UserError: a file is missing or does not fit the model.
        """

    def load_weights(self, *args: Any, **arguments: Any) -> Any:
        """Return a function that loads initial weights into parameters and buffers by name.

        None: training starts from the constructor's weights.
        """
        return None

    def save(self, *args: Any, **arguments: Any) -> Any:
        """Return a function that writes whole weights into a folder in the model's own format; None without one."""
        return None

    def vocab_size(self, *args: Any, **arguments: Any) -> int | None:
        """Return the number of tokens that the model knows; None for a model that takes no tokens."""
        return None

    def tp_plan(self, *args: Any, **arguments: Any) -> dict[str, str]:
        """Return how tensor parallelism divides modules, see `ModelConfig.tp_plan`; empty: it is not supported.

        Raises:
            UserError: the model's own plan cannot be applied.
        """
        return {}

    def tp_sizes(self, *args: Any, **arguments: Any) -> dict[str, int]:
        """Return the arguments that the degree of `tp_plan` must divide."""
        return {}

    def num_positions(self, *args: Any, **arguments: Any) -> int | None:
        """Return the most tokens that a row may have; None: not limited."""
        return None

    def image_sizes(self, *args: Any, **arguments: Any) -> dict[str, int]:
        """Return `image_size`, `num_channels` and `num_classes` of the images that the model accepts, if known."""
        return {}


def _vit_tiny() -> dict[str, Any]:
    sizes = {"image_size": 28, "num_channels": 1, "patch_size": 7, "num_layers": 4, "num_heads": 2}
    return {**sizes, "hidden_dim": 64, "mlp_dim": 128, "num_classes": 10}


@dataclass
class ModelConfig(OpenGroup):
    """The model, ours or yours: `_target_` is called with its arguments and returns an nn.Module."""

    target: Optional[str] = key("fsdp_lab.workloads.examples.vision.models.vit", named="_target_", named_by_option=True)
    """Import path of your callable that returns an nn.Module."""
    arguments: dict[str, Any] = key(_vit_tiny)
    """Every other key below `model`: an argument of the callable."""
    block_classes: Optional[list[str]] = key(None)
    """Paths to the classes that `per_block` shards; null: found from the module."""
    forward_methods: Optional[list[str]] = key(None)
    """Methods of sharding units that other modules call, such as `encode`; null: only `forward`."""
    tp_plan: Optional[dict[str, str]] = key(None)
    """How `sharding.tp` divides modules: name, with `*` for a number, to `colwise`, `rowwise` or another way to
    divide; null: the model's own plan."""
    flops_per_unit: Optional[float] = key(None, positive)
    """FLOPs of a forward and backward pass on one sample or token, for MFU; null: counted."""

    def function(self) -> Any:
        return import_callable(needed_target(self.target, "model"), "model._target_")

    def vocab_size(self) -> int | None:
        """Return the vocabulary size of a `ModelSource`, else the argument `vocab_size`; None if neither is known."""
        function = self.function()
        if isinstance(function, ModelSource):
            return function.vocab_size(**self.arguments)
        size = argument(function, self.arguments, "vocab_size")
        return size if isinstance(size, int) else None

    def known_tp_plan(self) -> dict[str, str] | None:
        """Return the tensor-parallel plan, empty for a model without one; None: not known before building."""
        function = self.function()
        if self.tp_plan is None and isinstance(function, ModelSource):
            return function.tp_plan(**self.arguments)
        plan = getattr(function, "_tp_plan", None) if self.tp_plan is None else self.tp_plan
        return None if plan is None else dict(plan)

    def tp_sizes(self) -> dict[str, int]:
        """Return the arguments that the degree of the model's own plan must divide, if the model names them."""
        if self.tp_plan is not None:
            return {}
        function = self.function()
        if isinstance(function, ModelSource):
            return function.tp_sizes(**self.arguments)
        sizes = {name: argument(function, self.arguments, name) for name in getattr(function, "_tp_divides", ())}
        return {name: size for name, size in sizes.items() if isinstance(size, int)}

    def sizes(self) -> dict[str, int]:
        """Return the sizes that a data set may use from a `ModelSource`; see `ModelSource.image_sizes`."""
        source = source_of(self)
        return {} if source is None else source.image_sizes(**self.arguments)

    def paths(self) -> list[str]:
        """Return the dotted paths of the target, of nested targets and of the block classes."""
        inner = (str(value["_target_"]) for _, value in nested(self.arguments, "model"))
        return [path for path in (self.target, *inner, *(self.block_classes or ())) if path]


@dataclass
class DataConfig(OpenGroup):
    """The data set, ours or yours: `_target_` is called with its arguments and `split="train"`, then `split="val"`.

    The target may have static methods. An error that `check_files(**arguments)` raises is reported before Ray starts;
    `least_vocab_size(**arguments)` and `least_num_classes(**arguments)` return what a model must know;
    `example_batch(size, **arguments)` returns a batch of that size without reading, the largest that may come; beside a
    `collate_fn` it counts if both are of one package.
    """

    target: Optional[str] = key(
        "fsdp_lab.workloads.examples.vision.digits.Digits", named="_target_", named_by_option=True
    )
    """Import path of your callable that returns a map-style data set."""
    arguments: dict[str, Any] = key(dict)
    """Every other key below `data`: an argument of the callable."""
    collate_fn: Optional[str] = key(None)
    """Import path of a function that makes a batch from a list of items; null: PyTorch's default_collate."""
    num_train: Optional[int] = key(None, at_least_one)
    """Use only the first so many training samples; null: all."""
    num_val: Optional[int] = key(None, at_least_one)
    """Use only the first so many validation samples; null: all."""
    val_batch_size: Optional[int] = key(None, at_least_one)
    """Validation samples that a worker takes at once; null: as many as a microbatch has."""
    loader_workers: Optional[int] = key(None, not_negative)
    """Loader processes of each worker; null: 0 on a CPU, on a GPU the worker's cores minus one, at most 4."""
    loader: Optional[str] = key(None)
    """In place of `_target_`: path to `f(split, batch_size, rank, world_size, seed)` that returns the batches of a rank
    in an epoch, as an object that can be iterated again; the other keys are its arguments, too."""
    example_batch: Optional[str] = key(None)
    """Path to `f(size)` that returns the largest batch that may come, for forecasts; the other keys are its arguments,
    too; null: as the target has it, or as the first items are, or the first batch of `loader`."""

    @property
    def name(self) -> str:
        """The option that names the target, else its dotted path, or that of the loader."""
        return self.loader or option_of("data", self.target or "") or self.target or ""

    @property
    def typed(self) -> str:
        """What names the callable, for messages."""
        return f"data.loader={self.loader}" if self.loader else f"data._target_={self.target}"

    def function(self) -> Any:
        """Return the callable that `_target_` or `loader` names; None for `data=example`."""
        if self.loader is not None:
            return import_callable(self.loader, "data.loader")
        target = needed_target(self.target, "data")
        return None if target == EXAMPLE_BATCH else import_callable(target, "data._target_")

    def sizes_from(self, model: ModelConfig) -> dict[str, int]:
        """Return the sizes of the model that the target has as arguments and that were not typed."""
        taken = parameters(self.function()) or {}
        return {name: size for name, size in model.sizes().items() if name in taken and name not in self.arguments}

    def arguments_for(self, model: ModelConfig) -> dict[str, Any]:
        """Return the arguments, with sizes of the model for untyped arguments of the target."""
        return {**self.sizes_from(model), **self.arguments}

    def check_files(self) -> None:
        """Call the target's `check_files`, if it has one.

        Raises:
            UserError: it raised an error.
        """
        try:
            self.ask("check_files")
        except UserError:  # our own data sets raise a complete message
            raise
        except Exception as error:
            raise UserError(f"{self.typed}: {type(error).__name__}: {error}") from error

    def ask(self, method: str, model: ModelConfig | None = None) -> Any:
        """Return what a static method of the target returns for the arguments; None without that method.

        Args:
            model: provides sizes that were not typed; None: use the target's defaults.
        """
        asked = getattr(self.function(), method, None)
        arguments = self.arguments if model is None else self.arguments_for(model)
        return None if asked is None else asked(**instantiate(arguments, "data"))

    def paths(self) -> list[str]:
        """Return the dotted paths of the target, of nested targets and of the functions."""
        inner = (str(value["_target_"]) for _, value in nested(self.arguments, "data"))
        paths = (self.target, *inner, self.collate_fn, self.loader, self.example_batch)
        return [path for path in paths if path and path != EXAMPLE_BATCH]


def may_lack_labels(task_name: str, data: DataConfig) -> bool:
    """Return whether batches may differ in the number of labels that count. Our packed rows and images do not."""
    return task_name == "seq2seq" or not str(data.target).startswith("fsdp_lab.")


def source_of(model: ModelConfig) -> ModelSource | None:
    """Return the `ModelSource` that a model's target names; None for any other model."""
    function = model.function() if model.target else None
    return function if isinstance(function, ModelSource) else None


def known_vocab_size(values: dict[str, Any]) -> int | None:
    """Return the vocabulary size of a model with a configuration file; None for other models.

    Args:
        values: the values of the group `model`.

    Raises:
        UserError: the file cannot be read.
    """
    model = ModelConfig.of_keys(values, "model.")
    return None if source_of(model) is None else model.vocab_size()


def needed_target(target: str | None, group: str) -> str:
    """Return the target of a group.

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

    name: str = key("classification", named_by_option=True)
    """Task."""
    loss: Optional[str] = key(None)
    """For `custom`: path to `f(model, batch)` that returns the mean loss of the batch, a scalar; or `(sum, count)`, two
    scalars, of the losses and of the labels that count, for the mean over all labels of the global batch."""
    metrics: Optional[str] = key(None)
    """For `custom`: path to `f(model, batch)` that returns `{name: (sum, count)}` in validation."""
    unit: Optional[str] = key(None, _is_unit)
    """What speed counts: `samples` or `tokens`; null: the task's own. Tokens of your batches are those of the first of
    these: `input_ids`, `labels`, the first rows of whole numbers, the count that your loss returns."""
    step: Optional[str] = key(None)
    """For `custom`: path to `f(parts, run)`, your step of several losses.

    `parts` are the model's children by name; `run.minimize(name, loss_of)` takes a step of the optimizer of that name.
    `task.loss` and `task.metrics` get the
    parts, too, and are for validation."""
    optimizers: Optional[str] = key(None)
    """With `step`: path to `f(parts, lr)` that returns `{name: optimizer}`; it gets `optimizer.lr`. Null: `optimizer`
    for each part."""
    after_step: Optional[str] = key(None)
    """Path to `f(parts, step)`, called without gradients after each step, with `{"model": the model}`, or with
    `task.step` the parts, and the number of the step, from 1. What it keeps in the model, as averages, is saved."""
    loss_chunks: int = key(1, at_least_one)
    """For `language`: compute the loss in so many parts of the sequence, which hold fewer logits at once."""

    def paths(self) -> list[str]:
        own = (self.loss, self.metrics, self.step, self.optimizers, self.after_step)
        return [path for path in own if path]
