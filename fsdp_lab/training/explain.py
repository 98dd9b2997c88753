"""PyTorch's errors about what is sharded, with the line of the user's code and a remedy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from linecache import getline
from pathlib import Path

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from fsdp_lab.config.errors import ModelError, UserError
from fsdp_lab.config.parallel import Api, Dtype
from fsdp_lab.config.target import user_line
from fsdp_lab.config.trial import TrialConfig

_FREED = "out of bounds for storage of size 0"
_MIXED = "mixed torch.Tensor and DTensor"
_NO_RULE = ("Sharding propagation failed", "sharding strategy")  # of DTensor
_FLAT = ("got 1-D tensor", "must be 2-D", "size mismatch, got input")  # the part of a weight that a rank keeps
_SIZES = (
    "invalid for input of size",
    "same reduction dim",
    "cannot be multiplied",
    "broadcast a dim",
    "must match the size",
)
_IDLE = "but current state is TrainingState.IDLE"
_METHODS = "name a method that uses them with model.forward_methods=[...], "
_WAITS = "finished reduction in the prior iteration"
_TYPES = ("must have the same dtype", "expected scalar type", "should be the same")


@contextmanager
def sharding_explained(model: nn.Module, config: TrialConfig, forward: bool) -> Iterator[None]:
    """Explain an error of a `forward` or a backward pass that comes from how DDP or FSDP works.

    Raises:
        ModelError: a tensor of freed parameters was used, parameters were used outside of their unit, or types differ
            because FSDP casts.
        UserError: parameters got no gradient in DDP's last step, although they did when `leaves_some_unused` looked.
    """
    try:
        yield
    except (RuntimeError, ValueError, UserError) as error:  # a task may have taken it for a batch that does not fit
        is_sharded = isinstance(model, FSDPModule | FullyShardedDataParallel)
        if is_sharded and (why := _why(error, config, forward)) is not None:
            raise ModelError(why) from error
        if _WAITS not in str(error):
            raise
        raise UserError(
            "sharding=ddp: some parameters got no gradient in the last step, for example because layers are dropped at "
            "random or frozen later, and DDP waits for every gradient; use every layer in each step (add 0 times its "
            "output), or, if all ranks leave out the same ones, sharding=root or per_block."
        ) from error


@contextmanager
def optimizer_explained(config: TrialConfig) -> Iterator[None]:
    """Explain an error of the step of the user's optimizer that comes from sharded parameters.

    Raises:
        UserError: PyTorch has no rule for an operation on a `DTensor`, or one meets a plain tensor.
    """
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        if config.optimizer.target is None or not any(words in str(error) for words in (*_NO_RULE, _MIXED)):
            raise
        raise UserError(
            f"sharding={config.sharding.granularity.name}: PyTorch cannot take the step of "
            f"optimizer._target_={config.optimizer.target} with sharded parameters{_at(error)}: "
            f"{str(error).strip().partition(chr(10))[0]} Let it work on x.full_tensor(), or use another optimizer, or "
            "sharding=ddp, which keeps parameters whole."
        ) from error


def _why(error: Exception, config: TrialConfig, forward: bool) -> str | None:
    text, sharding, api = str(error), f"sharding={config.sharding.granularity.name}", config.sharding.api_name
    is_flat = config.sharding.api is Api.fsdp1
    at = _at(error.__cause__ or error)
    if _MIXED in text and (tp := config.sharding.tp) > 1:
        return (
            f"sharding.tp={tp}: a tensor that is divided among ranks meets a whole one{at}; call modules that "
            "model.tp_plan names instead of using their weights, and name no module whose weight or output other code "
            f"needs whole (a head gives whole logits by colwise_gathered); or use sharding.tp=1 with {sharding}."
        )
    if forward and _MIXED in text:
        return (
            f"{sharding}: a weight of a unit is used outside of it{at}, but FSDP2 gathers the weights of a unit for "
            f"its forward pass only; {_METHODS}call the module that holds the weight, or use a coarser sharding, such "
            "as root."
        )
    if forward and is_flat and any(words in text for words in _FLAT):
        return (
            f"{sharding} sharding.api=fsdp1: {text.rstrip('.')}{at}. If that is a weight of a unit used outside of it: "
            "FSDP1 gathers the weights of a unit for its forward pass only, and keeps a flat part else; call the "
            "module that holds the weight, or use a coarser sharding, such as root."
        )
    if is_flat and not forward and (_FREED in text or _IDLE in text):
        return (
            f"{sharding} sharding.api=fsdp1: the backward pass reached a unit through no tensor that its forward pass "
            f"returned{at}, so FSDP1 did not gather its weights. It looks into tuples, lists, dictionaries and "
            "dataclasses, not into other objects, and loses a view that is changed in place: return tensors, or use "
            "sharding.api=fsdp2."
        )
    if _FREED in text or _MIXED in text:
        return (
            f"{sharding} reshard_after_forward={config.reshard_after_forward.policy.name}: a tensor of a unit is used "
            f"after its parameters were freed{at}. FSDP2 gathers them again for tensors that a forward pass returns: "
            "return it as a tensor or in a container, .clone() a view, or use reshard_after_forward=never."
        )
    if forward and config.sharding.tp > 1 and any(words in text for words in _SIZES):
        return (
            f"sharding.tp={config.sharding.tp}: {text.rstrip('.')}{at}. Between a `colwise` and a `rowwise` layer each "
            "worker has a part of the features: write -1 for their number or that of heads, name both layers in "
            "model.tp_plan, and use a degree that divides the heads."
        )
    param_dtype = config.precision.param_dtype
    if param_dtype is not Dtype.float32 and any(words in text for words in _TYPES):
        return (
            f"precision.param_dtype={param_dtype.value}: {text.rstrip('.')}. {api} casts parameters and inputs to "
            f"{param_dtype.value}, and no buffers or what forward makes: cast these there, as buffer.to(x.dtype), or "
            "use precision=fp32 or sharding=ddp."
        )
    return None


def _at(error: BaseException) -> str:
    """Return the user's line that raised an error, with its text; "" if none did."""
    file, _, number = user_line(error).rpartition(":")
    return f" ({file}:{number}: {getline(str(Path(file).resolve()), int(number)).strip()})" if file else ""
