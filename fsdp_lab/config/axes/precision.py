"""`precision`: the types of computation and communication."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from fsdp_lab.config.axes.base import Axis, Where, refuse
from fsdp_lab.config.errors import CombinationError, ConfigError, UserError
from fsdp_lab.config.key import at_least_one, key, positive
from fsdp_lab.machine import hardware

if TYPE_CHECKING:
    from fsdp_lab.config.ranks import Ranks
    from fsdp_lab.config.trial import TrialConfig

FLOAT8_SINCE = (8, 9)  # a GPU's compute capability


class Dtype(Enum):
    """A floating-point type by its PyTorch name."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


@dataclass
class PrecisionConfig:
    """The types of computation, communication and storage."""

    param_dtype: Dtype = key(Dtype.float32, named_by_option=True)
    """Type of gathered parameters and of computation."""
    reduce_dtype: Dtype = key(Dtype.float32, named_by_option=True)
    """Type in which gradients are reduced."""
    storage_dtype: Dtype = key(Dtype.float32, named_by_option=True)
    """Type of parameters, gradients and optimizer states; bfloat16: as after `model.to(torch.bfloat16)`."""
    loss_scaling: bool = key(False, named_by_option=True)
    """Scale the loss dynamically, as float16 needs."""
    float8: bool = key(False, named_by_option=True)
    """Multiply in float8, scaled by rows, in the linear layers of blocks; needs torchao."""
    tf32: bool = key(False, named_by_option=True)
    """Multiply float32 matrices in TF32 on GPUs since Ampere, by `torch.set_float32_matmul_precision("high")`."""
    init_scale: float = key(65536.0, positive)
    """First scale of the loss."""
    growth_interval: int = key(2000, at_least_one)
    """Steps without an overflow after which the scale doubles."""

    @property
    def multiplied_in(self) -> str:
        """The type in which a GPU multiplies matrices, as data sheets name it."""
        return "tfloat32" if self.tf32 else self.param_dtype.value

    @property
    def is_narrow(self) -> bool:
        """Whether the model is stored in a narrow type, with nothing in float32."""
        return self.storage_dtype is not Dtype.float32


def _check(trial: TrialConfig, ranks: Ranks) -> None:
    precision = trial.precision
    if precision.tf32 and precision.param_dtype is not Dtype.float32:
        raise CombinationError(
            f"precision.tf32=true with precision.param_dtype={precision.param_dtype.name}: TF32 multiplies float32 "
            "matrices; use precision=tf32, or precision.tf32=false.",
        )
    if precision.float8 and precision.param_dtype is not Dtype.bfloat16:
        raise CombinationError(
            f"precision.float8=true with precision.param_dtype={precision.param_dtype.name}: float8 products have "
            "bfloat16 results; use precision=float8, or precision.param_dtype=bfloat16.",
        )
    if precision.loss_scaling and precision.param_dtype is Dtype.bfloat16:
        raise CombinationError(
            "precision.loss_scaling=true with precision.param_dtype=bfloat16: bfloat16 has float32's range and "
            "needs no scaling; use precision.loss_scaling=false or precision=fp16.",
        )
    if precision.is_narrow:
        _check_storage(trial)


def _check_storage(trial: TrialConfig) -> None:
    precision = trial.precision
    if precision.storage_dtype is Dtype.float16:
        raise ConfigError(
            "precision.storage_dtype=float16: parameters in float16 lose most updates, and loss scaling needs them in "
            "float32; use precision=fp16, which computes in float16, or precision=bf16_pure."
        )
    refuse(
        "precision.storage_dtype=bfloat16",
        {
            f"precision.param_dtype={precision.param_dtype.name}": (
                precision.param_dtype is not Dtype.bfloat16,
                "a model in bfloat16 computes in it; use precision.param_dtype=bfloat16",
            ),
            f"precision.reduce_dtype={precision.reduce_dtype.name}": (
                precision.reduce_dtype is Dtype.float16,
                "float16 lacks the range of these gradients; use precision.reduce_dtype=bfloat16",
            ),
            f"precision.reduce_dtype={precision.reduce_dtype.name} and sharding=ddp": (
                precision.reduce_dtype is Dtype.float32 and trial.sharding.kind == "ddp",
                "DDP reduces gradients in the type that they have; use precision.reduce_dtype=bfloat16",
            ),
        },
        ", or precision.storage_dtype=float32.",
    )


def check_float8(trial: TrialConfig, is_here: bool) -> None:
    """Raise UserError if float8 is asked for without torchao or GPUs for it. Workers of a cluster check their own."""
    if not trial.precision.float8:
        return
    capability, needs = hardware.least_capability(), "a GPU of compute capability 8.9 (Ada, Hopper or newer)"
    if is_here and (capability is None or capability < FLOAT8_SINCE):
        has = "machine has no GPU" if capability is None else f"machine's GPU has {capability[0]}.{capability[1]}"
        raise UserError(f"precision=float8 needs {needs}, and this {has}; use precision=bf16_mixed.")
    if importlib.util.find_spec("torchao") is None:
        raise UserError(
            "precision=float8 needs torchao, which is not installed: pip install -e '.[float8]' in the clone."
        )


def _notes(trial: TrialConfig, where: Where) -> Iterator[str]:
    precision = trial.precision
    if not where.cuda:
        if precision.tf32:
            yield "precision=tf32 has no effect on a CPU: it computes as with precision=fp32."
    elif precision.tf32 and where.has_tf32 is False:
        yield "precision=tf32 has no effect on this GPU: TF32 needs compute capability 8.0 (Ampere) or newer."
    elif precision.param_dtype is Dtype.float32 and not precision.tf32 and where.has_tf32:
        yield (
            "precision.param_dtype=float32 multiplies matrices in full precision, as PyTorch does by default (its "
            "convolutions use TF32). precision=tf32 multiplies them in TF32, which is several times as fast."
        )


AXIS = Axis(
    ("precision",),
    plain="fp32",
    changes_losses=True,
    is_layout=False,
    check=_check,
    check_machine=check_float8,
    notes=_notes,
)
