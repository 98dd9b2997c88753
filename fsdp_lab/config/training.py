"""The keys of training, optimizer, learning rate, checkpoints and checks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, List, Optional  # OmegaConf reads this on every Python that this project supports

from fsdp_lab.config.key import at_least_one, below_one, key, not_negative, positive
from fsdp_lab.config.serialize import OursOrUsers
from fsdp_lab.config.target import import_callable, instantiate, nested, parameters


class OptimizerName(Enum):
    adam = "adam"
    adamw = "adamw"
    sgd = "sgd"
    custom = "custom"


class OptimizerImplementation(Enum):
    """PyTorch's implementations of an optimizer step; see `OptimizerConfig.implementation`."""

    auto = "auto"
    fused = "fused"
    foreach = "foreach"
    for_loop = "for_loop"


class Decay(Enum):
    """The parameters that decay; see `OptimizerConfig.decay`."""

    all = "all"
    matrices = "matrices"


class LrScheduleName(Enum):
    """Shapes of the learning rate after the warm-up; see `LrScheduleConfig`."""

    constant = "constant"
    cosine = "cosine"
    step = "step"
    custom = "custom"


# The operators below `torch.ops` whose outputs `selective` keeps: torchtitan's list
# (`torchtitan/distributed/activation_checkpoint.py`) without communication, plus attention on a CPU.
MATRIX_PRODUCTS = (  # every second one of these
    "aten.mm.default",
    "aten.addmm.default",
    "aten.linear.default",
    "aten._scaled_mm.default",
)
SAVED_OPERATORS = (
    *MATRIX_PRODUCTS,
    "aten.bmm.default",
    "aten.convolution.default",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "aten._scaled_dot_product_attention_math.default",
    "aten._scaled_dot_product_fused_attention_overrideable.default",
    "aten._flash_attention_forward.default",
    "aten._efficient_attention_forward.default",
    "aten.upsample_bilinear2d.default",
    "aten.max.default",
    "aten.topk.default",
    "_c10d_functional.reduce_scatter_tensor.default",  # of tensor-parallel layers
    "higher_order.flex_attention",
)


class Init(Enum):
    """Where first weights are built; see `TrialConfig.init`."""

    plain = "plain"
    rank0 = "rank0"
    meta = "meta"


# `async` is a keyword of Python, so this enum uses the functional form.
CheckpointMode = Enum("CheckpointMode", {"off": "off", "sync": "sync", "async": "async"})


class CheckName(Enum):
    """What a sweep is compared with: a plain loop, or nothing; see `CheckConfig`."""

    plain = "plain"
    off = "off"


class MemoryProfile(Enum):
    """How much of a step's memory is recorded; see `TrialConfig.memory_profile`."""

    off = "off"
    peaks = "peaks"
    timeline = "timeline"


@dataclass
class TrainingConfig:
    """How long a trial trains, and with which batches."""

    epochs: int = key(2, at_least_one)
    """Passes over the training data."""
    max_steps: Optional[int] = key(None, at_least_one)
    """Optimizer steps after which a trial ends; null: only `epochs` counts."""
    epoch_steps: Optional[int] = key(None, at_least_one)
    """With `data.loader`: optimizer steps of an epoch. The next epoch continues in the loader, which restarts when it
    ends; null: an epoch is the whole loader."""
    global_batch_size: int = key(64, at_least_one)
    """Samples of an optimizer step, over all workers; `${per_worker:64}` is 64 for each. With `data.loader` a hint."""
    grad_accum_steps: int = key(1, at_least_one)
    """Microbatches of an optimizer step on each worker."""
    sync_each_microbatch: bool = key(False)
    """Reduce gradients after each microbatch, so that a rank never holds the whole model's."""
    seed: int = key(0, not_negative)
    """Seed of first weights, order of data and dropout."""
    max_grad_norm: Optional[float] = key(None, positive, example=1)
    """Clip gradients to this norm; null: no clipping."""
    timing_warmup_steps: int = key(3, not_negative)
    """Optimizer steps at the start of a run that the speed excludes."""

    def total_steps(self, steps_per_epoch: int | None) -> int:
        """Return the optimizer steps of all epochs; `max_steps` if those of an epoch are not known."""
        return (self.max_steps or 1) if steps_per_epoch is None else steps_per_epoch * self.epochs

    def num_steps(self, steps_per_epoch: int | None) -> int:
        """Return the optimizer steps of a trial."""
        steps = self.total_steps(steps_per_epoch)
        return steps if self.max_steps is None else min(steps, self.max_steps)

    def is_through(self, epoch: float, step: float) -> bool:
        """Return whether a trial has finished its training.

        Args:
            epoch: the number of its epochs so far; `max_steps` may have cut the last one short.
            step: the number of its optimizer steps so far.
        """
        return epoch >= self.epochs or (self.max_steps is not None and step >= self.max_steps)


@dataclass
class OptimizerConfig(OursOrUsers):
    """The optimizer: one of ours, or yours: `_target_` is called with `params`, `lr` and its arguments."""

    target: Optional[str] = key(None, named="_target_")
    """For `custom`: import path of your class, or of a callable that returns a torch.optim.Optimizer."""
    arguments: dict[str, Any] = key(dict)
    """For `custom`, every key below `optimizer` but `lr`, `scale_lr` and `groups`: an argument of the class."""
    name: OptimizerName = key(OptimizerName.adam, named_by_option=True)
    """Algorithm."""
    lr: float = key(1e-3, positive)
    """Learning rate."""
    weight_decay: float = key(0.0, not_negative)
    """Weight decay; decoupled with `adamw`."""
    beta1: float = key(0.9, below_one)
    """Adam's decay of the first moment."""
    beta2: float = key(0.999, below_one)
    """Adam's decay of the second moment."""
    momentum: float = key(0.0, not_negative)
    """Momentum of `sgd`."""
    implementation: OptimizerImplementation = key(OptimizerImplementation.auto)
    """PyTorch's implementation; `auto`: fused if supported, else foreach."""
    scale_lr: bool = key(False)
    """Multiply `lr` by the data-parallel degree: the number of workers, divided by `sharding.tp`."""
    groups: Optional[str] = key(None)
    """Path to `f(named_parameters)` that returns parameter groups of PyTorch's form. It gets the names and parameters
    that are trained, as the constructor made them, before they are sharded."""
    decay: Decay = key(Decay.all)
    """`matrices`: `weight_decay` only for parameters with two dimensions or more: for no bias and no norm."""
    embedding_lr: Optional[float] = key(None, positive, example=1e-4)
    """Learning rate of the weights of `nn.Embedding`; null: `lr`."""
    own_keys: ClassVar[tuple[str, ...]] = ("_target_", "name", "lr", "scale_lr", "groups")

    @property
    def kind(self) -> str:
        """The name of ours, or the path of the user's."""
        return self.target or self.name.name

    @property
    def has_groups(self) -> bool:
        """Whether keys make groups of the parameters."""
        return self.target is None and (self.decay is Decay.matrices or self.embedding_lr is not None)

    @property
    def users_arguments(self) -> dict[str, Any]:
        """The arguments of the user's class, without the parameters."""
        return {"lr": self.lr, **self.arguments}

    def paths(self) -> list[str]:
        inner = (str(value["_target_"]) for _, value in nested(self.arguments, "optimizer"))
        return [path for path in (self.target, self.groups, *inner) if path]

    def chosen_implementation(self, loss_scaling: bool, has_complex: bool = False) -> OptimizerImplementation:
        """Return the implementation, with `auto` resolved to fused where PyTorch supports it, else foreach.

        Fused also avoids a loop over the parameters in offloaded Adam (pytorch#187615). Three cases use foreach. With
        loss scaling, fused kernels would unscale themselves, but only plain tensors. DTensor does not support the fused
        kernel of SGD. Fused kernels reject complex parameters.
        """
        if self.implementation is not OptimizerImplementation.auto:
            return self.implementation
        plain = loss_scaling or has_complex or self.name is OptimizerName.sgd
        return OptimizerImplementation.foreach if plain else OptimizerImplementation.fused


@dataclass
class LrScheduleConfig(OursOrUsers):
    """The learning rate over the steps of a trial: one of ours, or yours: `_target_` is called with the optimizer."""

    target: Optional[str] = key(None, named="_target_")
    """For `custom`: import path of your class, or of a callable that returns a schedule of PyTorch's form."""
    arguments: dict[str, Any] = key(dict)
    """For `custom`, every key below `lr_schedule`: an argument of the class. One that takes `total_steps` or
    `num_training_steps` gets the steps of the trial: of all epochs, or `training.max_steps` if that is less."""
    name: LrScheduleName = key(LrScheduleName.constant, named_by_option=True)
    """Shape after the warm-up."""
    warmup_steps: int = key(0, not_negative)
    """Optimizer steps over which the rate rises linearly to `lr`."""
    min_lr_ratio: float = key(0.0, not_negative)
    """Last rate of `cosine`, as a ratio to `lr`."""
    step_epochs: int = key(1, at_least_one)
    """Epochs between two drops of `step`."""
    gamma: float = key(0.7, positive)
    """Factor of each drop of `step`."""
    own_keys: ClassVar[tuple[str, ...]] = ("_target_", "name")

    def users_arguments(self, total_steps: int) -> dict[str, Any]:
        """Return the arguments of the user's callable, without the optimizer.

        Args:
            total_steps: of the trial.
        """
        return {**dict.fromkeys(self.takes_steps(), total_steps), **instantiate(self.arguments, "lr_schedule")}

    def takes_steps(self) -> list[str]:
        """Return the user's callable's parameters for the number of steps that are not typed."""
        taken = parameters(import_callable(str(self.target), "lr_schedule._target_")) or {}
        return [name for name in _STEPS if name in taken and name not in self.arguments]

    def paths(self) -> list[str]:
        inner = (str(value["_target_"]) for _, value in nested(self.arguments, "lr_schedule"))
        return [path for path in (self.target, *inner) if path]


_STEPS = ("total_steps", "num_training_steps")  # as PyTorch and transformers name them


@dataclass
class CheckpointConfig:
    """Which state of a trial is kept, to resume it or to export its model."""

    mode: CheckpointMode = key(CheckpointMode["sync"])  # type: ignore[valid-type]
    """`sync` saves checkpoints between steps, `async` in the background, `off` saves none."""
    every_epochs: int = key(1, at_least_one)
    """Epochs between two checkpoints."""
    keep_last: int = key(1, at_least_one)
    """Number of newest checkpoints to keep."""
    keep_best: bool = key(True)
    """Also keep the checkpoint with the lowest validation loss."""
    resume_from: Optional[str] = key(None)
    """Checkpoint of another run, or a folder of them, whose weights and optimizer state to start with; null: none."""
    any_torch_version: bool = key(False)
    """Load a checkpoint of another minor version of PyTorch."""
    export_best: bool = key(False)
    """Export the model with the lowest validation loss instead of the last one."""


def _are_overrides(words: List[str]) -> str | None:
    """Take overrides, such as `[model.num_layers=2]`."""
    wrong = [word for word in words if not word.partition("=")[0] or "=" not in word]
    return f"has {wrong[0]}, which is no override; use for example check.keys=[model.num_layers=2]" if wrong else None


@dataclass
class CheckConfig:
    """The comparison with a plain loop, which calls your model, data and loss as they are, in one process."""

    name: CheckName = key(CheckName.plain, named_by_option=True)
    """Compare with a plain loop of three steps, or do not (`off`)."""
    limit_s: float = key(60.0, positive)
    """Seconds that the plain loops of a sweep may take together."""
    keys: List[str] = key(list, _are_overrides)
    """Overrides with which a smaller model is compared, such as `[model.num_layers=2]`; empty: the sweep's own."""

    @property
    def enabled(self) -> bool:
        return self.name is CheckName.plain
