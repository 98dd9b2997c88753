"""How a model is trained and what is kept of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Optional  # OmegaConf reads this on every Python that this project supports

from fsdp_lab.config.errors import CombinationError
from fsdp_lab.config.key import Between, Memory, at_least_one, below_one, key, not_negative, positive


class OptimizerName(Enum):
    adam = "adam"
    adamw = "adamw"
    sgd = "sgd"


class OptimizerImplementation(Enum):
    auto = "auto"
    fused = "fused"
    foreach = "foreach"
    for_loop = "for_loop"


class StateDtype(Enum):
    fp32 = "fp32"
    bf16 = "bf16"


class LrScheduleName(Enum):
    constant = "constant"
    cosine = "cosine"
    step = "step"


class ActivationCheckpointing(Enum):
    """Which blocks are recomputed in the backward pass: all (`full`), every n-th (`every_n`), or all but the outputs of
    some operators (`selective`)."""

    none = "none"
    full = "full"
    every_n = "every_n"
    selective = "selective"


# What `selective` keeps, below `torch.ops`: torchtitan's list (`torchtitan/distributed/activation_checkpoint.py`)
# without communication, and the attention of a CPU.
MATRIX_PRODUCTS = ("aten.mm.default", "aten.addmm.default", "aten.linear.default")  # of these every second one
SAVED_OPERATORS = (
    *MATRIX_PRODUCTS,
    "aten.bmm.default",
    "aten.convolution.default",
    "aten._scaled_mm.default",
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
    "higher_order.flex_attention",
)


class Init(Enum):
    rank0 = "rank0"
    meta = "meta"


# `async` is a keyword of Python, so this one takes the functional form.
CheckpointMode = Enum("CheckpointMode", {"off": "off", "sync": "sync", "async": "async"})


class MemoryProfile(Enum):
    off = "off"
    peaks = "peaks"
    timeline = "timeline"


@dataclass
class TrainingConfig:
    """`timing_warmup_steps` optimizer steps at the start of a run stay out of the speed figures.

    `sync_each_microbatch`: reduce the gradients of each microbatch, not only of the last, so that a rank holds those
    of its shard alone between them, and never the whole model's.
    """

    epochs: int = key(2, at_least_one, may_differ=Between.CHECKPOINT)
    max_steps: Optional[int] = key(None, at_least_one, may_differ=Between.CHECKPOINT)
    global_batch_size: int = key(64, at_least_one, memory=Memory.VALUE)
    grad_accum_steps: int = key(1, at_least_one, memory=Memory.VALUE)
    sync_each_microbatch: bool = key(False, memory=Memory.VALUE)
    seed: int = key(0, not_negative, changes_speed=False)
    max_grad_norm: Optional[float] = key(None, positive, memory=Memory.WHETHER, example=1)
    timing_warmup_steps: int = key(3, not_negative, may_differ=Between.CHECKPOINT)

    def check(self, num_workers: int) -> None:
        """
        Raises:
            CombinationError: the batch cannot be divided.
        """
        parts = num_workers * self.grad_accum_steps
        if self.global_batch_size % parts:
            below = self.global_batch_size // parts * parts
            choices = f"{below} or {below + parts}" if below else f"{parts}"
            raise CombinationError(
                f"training.global_batch_size={self.global_batch_size} is not divided by "
                f"cluster.num_workers={num_workers} times training.grad_accum_steps={self.grad_accum_steps}"
                f" = {parts}; use for example {choices}.",
                keys=("training.global_batch_size", "cluster.num_workers", "training.grad_accum_steps"),
            )


@dataclass
class OptimizerConfig:
    """`scale_lr` multiplies `lr` by the number of workers; `state_dtype` is of Adam's moments."""

    name: OptimizerName = key(OptimizerName.adam, named_by_option=True, memory=Memory.VALUE)
    lr: float = key(1e-3, positive, changes_speed=False)
    weight_decay: float = key(0.0, not_negative, memory=Memory.WHETHER)
    beta1: float = key(0.9, below_one, changes_speed=False)
    beta2: float = key(0.999, below_one, changes_speed=False)
    momentum: float = key(0.0, not_negative, memory=Memory.WHETHER)
    implementation: OptimizerImplementation = key(OptimizerImplementation.auto, memory=Memory.VALUE)
    scale_lr: bool = key(False, changes_speed=False)
    state_dtype: StateDtype = key(StateDtype.fp32, memory=Memory.VALUE)

    def chosen_implementation(self, loss_scaling: bool) -> OptimizerImplementation:
        """Return what `auto` comes to: fused, which also keeps offloaded Adam from a loop over the parameters
        (pytorch#187615). It is foreach with loss scaling, because fused kernels unscale by themselves, on plain tensors
        only, and for SGD, whose fused kernel DTensor does not know."""
        if self.implementation is not OptimizerImplementation.auto:
            return self.implementation
        plain = loss_scaling or self.name is OptimizerName.sgd
        return OptimizerImplementation.foreach if plain else OptimizerImplementation.fused

    def check(self) -> None:
        """
        Raises:
            CombinationError: momentum for an optimizer that has none, or a dtype of moments for one without.
        """
        if self.name is OptimizerName.sgd and self.state_dtype is not StateDtype.fp32:
            raise CombinationError(
                f"optimizer.state_dtype={self.state_dtype.name} with optimizer=sgd: it is the type of Adam's moments; "
                "use optimizer.state_dtype=fp32, or optimizer=adam or adamw.",
                keys=("optimizer.state_dtype", "optimizer"),
            )
        if self.name is not OptimizerName.sgd and self.momentum:
            raise CombinationError(
                f"optimizer.momentum={self.momentum} with optimizer={self.name.name}: momentum belongs to "
                "sgd; use optimizer=sgd, or optimizer.beta1 for Adam.",
                keys=("optimizer.momentum", "optimizer"),
            )


@dataclass
class LrScheduleConfig:
    """`step` multiplies by `gamma` every `step_epochs` epochs; `cosine` ends at `min_lr_ratio * lr`."""

    name: LrScheduleName = key(LrScheduleName.constant, named_by_option=True)
    warmup_steps: int = key(0, not_negative)
    min_lr_ratio: float = key(0.0, not_negative)
    step_epochs: int = key(1, at_least_one)
    gamma: float = key(0.7, positive)


@dataclass
class CheckpointConfig:
    """`resume_from`: a checkpoint, or a folder of them, that another run left; null starts anew. `export_best`: the
    exported model is that of the checkpoint with the least validation loss, not that of the last step."""

    mode: CheckpointMode = key(CheckpointMode["sync"])  # type: ignore[valid-type]
    every_epochs: int = key(1, at_least_one)
    keep_last: int = key(1, at_least_one)
    keep_best: bool = key(True)
    resume_from: Optional[str] = key(None)
    any_torch_version: bool = key(False)
    export_best: bool = key(False)

    def check(self) -> None:
        """
        Raises:
            CombinationError: the best is to be exported, and is not kept.
        """
        if self.export_best and (self.mode is CheckpointMode["off"] or not self.keep_best):
            lacks = "checkpoint.mode=off" if self.mode is CheckpointMode["off"] else "checkpoint.keep_best=false"
            raise CombinationError(
                f"checkpoint.export_best=true with {lacks}: no best checkpoint is kept that could be exported; use "
                "checkpoint.mode=sync and checkpoint.keep_best=true, or checkpoint.export_best=false.",
                keys=("checkpoint.export_best", "checkpoint.mode", "checkpoint.keep_best"),
            )
