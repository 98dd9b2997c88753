"""PyTorch's errors about what is sharded, with the line of the user's code and a remedy."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from linecache import getline
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from fsdp_lab.config.errors import ModelError, UserError
from fsdp_lab.config.parallel import Api, Dtype
from fsdp_lab.config.target import user_line
from fsdp_lab.config.trial import TrialConfig
from fsdp_lab.training.flat_parts import PartUsed
from fsdp_lab.workloads.base import original_name

_FREED = "out of bounds for storage of size 0"
_MIXED = "mixed torch.Tensor and DTensor"
_NO_RULE = ("Sharding propagation failed", "sharding strategy")  # of DTensor
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
_TWICE = "mark a variable ready only once"
_CHAIN = re.compile(r"[A-Za-z_]\w*(?:\.\w+|\[\d+\])*")  # such as self.blocks[0].weight
_NO_KERNEL = re.compile("(not implemented for '|Unsupported dtype )(B?Float16|Half)")


@contextmanager
def sharding_explained(model: nn.Module, config: TrialConfig, forward: bool) -> Iterator[None]:
    """Explain an error of a `forward` or a backward pass that comes from how DDP or FSDP works.

    Raises:
        ModelError: a tensor of freed parameters was used, parameters were used outside of their unit, or types differ
            because FSDP casts.
        UserError: parameters got no gradient in DDP's last step, although they did when `leaves_some_unused` looked, or
            were used by two calls of the model; or an operator has no kernel for 16 bits.
    """
    try:
        yield
    except (RuntimeError, ValueError, UserError) as error:  # a task may have taken it for a batch that does not fit
        is_sharded = isinstance(model, FSDPModule | FullyShardedDataParallel)
        if (why := _in_16_bits(error, config)) is not None:
            raise ModelError(why) from error
        if is_sharded and (why := _why(error, model, config, forward)) is not None:
            raise ModelError(why) from error
        if _TWICE in str(error):
            raise ModelError(
                "sharding=ddp: a parameter is ready twice in one step, as where a loss calls the model twice and some "
                "parameters get no gradient; call it once, with both inputs in one batch, let each call use all (add 0 "
                "times the output of what it does not need), or use sharding=root."
            ) from error
        if _WAITS not in str(error):
            raise
        raise UserError(
            "sharding=ddp: some parameters got no gradient in the last step, for example because layers are dropped at "
            "random or frozen later, and DDP waits for every gradient; use sharding.find_unused_parameters=true."
        ) from error


@contextmanager
def optimizer_explained(config: TrialConfig) -> Iterator[None]:
    """Explain an error of the step of the user's optimizer that comes from sharded parameters.

    Raises:
        UserError: PyTorch has no rule for an operation on a `DTensor`, or one meets a plain tensor.
    """
    try:
        yield
    except (AssertionError, TypeError) as error:
        if config.optimizer.target is None:
            raise
        raise UserError(
            f"the step of optimizer._target_={config.optimizer.target} fails{_at(error)}: {type(error).__name__} "
            f"{error}. fsdp_lab calls step() without arguments, once after the backward pass; use an optimizer that "
            "needs none."
        ) from error
    except (RuntimeError, NotImplementedError) as error:
        if config.optimizer.target is None or not any(words in str(error) for words in (*_NO_RULE, _MIXED)):
            raise
        raise UserError(
            f"sharding={config.sharding.granularity.name}: PyTorch cannot take the step of "
            f"optimizer._target_={config.optimizer.target} with sharded parameters{_at(error)}: "
            f"{str(error).strip().partition(chr(10))[0]} Let it work on x.full_tensor(), or use another optimizer, or "
            "sharding=ddp, which keeps parameters whole."
        ) from error


def _in_16_bits(error: Exception, config: TrialConfig) -> str | None:
    param_dtype, cause = config.precision.param_dtype, error.__cause__ or error
    if param_dtype is Dtype.float32 or not _NO_KERNEL.search(str(cause)):
        return None
    return (
        f"precision.param_dtype={param_dtype.value}: {str(cause).rstrip('.')}{_at(cause)}. PyTorch does not compute "
        f"this in {param_dtype.value} on this device: do it in float32, as f(x.float()).to(x.dtype), or use "
        "precision=fp32."
    )


def _why(error: Exception, model: nn.Module, config: TrialConfig, forward: bool) -> str | None:
    text, sharding, api = str(error), f"sharding={config.sharding.granularity.name}", config.sharding.api_name
    is_flat = config.sharding.api is Api.fsdp1
    cause = error.__cause__ or error
    at = _at(cause)
    if _MIXED in text and (tp := config.sharding.tp) > 1:
        return (
            f"sharding.tp={tp}: a tensor that is divided among ranks meets a whole one{at}; call modules that "
            "model.tp_plan names instead of using their weights, and name no module whose weight or output other code "
            f"needs whole (a head gives whole logits by colwise_gathered); or use sharding.tp=1 with {sharding}."
        )
    if forward and _MIXED in text:
        name = _parameter(cause, model)
        here = f", here {name}" if name else ""
        if name and _at_work(cause, model, name):
            return (
                f"{sharding}: the weights of a unit were freed during its forward pass{at}{here}, as a gradient does "
                "that is taken inside of it (torch.autograd.grad): take it in task.loss, of what the model returns, or "
                "use sharding=root."
            )
        return (
            f"{sharding}: a weight of a unit is used outside of it{at}{here}, but FSDP2 gathers "
            f"the weights of a unit for its forward pass only; {_METHODS}call the module that holds the weight, or use "
            "a coarser sharding, such as root."
        )
    if isinstance(cause, PartUsed):
        return (
            f"{sharding} sharding.api=fsdp1: {cause} is used outside of its unit{at}, but FSDP1 gathers the weights of "
            "a unit for its forward pass only, and each rank has a flat part of them else, whose gradients are lost. "
            "Use sharding=ddp, or call the module that holds the weight. With sharding=root weights are whole while "
            "the model is called."
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
            f"precision.param_dtype={param_dtype.value}: {str(cause).rstrip('.')}{at}. {api} casts parameters and "
            f"inputs to {param_dtype.value}, and no buffers{_buffers(cause, model)} or what forward makes: cast these "
            "there, as buffer.to(x.dtype), or use precision=fp32 or sharding=ddp."
        )
    return None


def _at(error: BaseException) -> str:
    """Return the user's line that raised an error, with its text; "" if none did."""
    file, _, number = user_line(error).rpartition(":")
    return f" ({file}:{number}: {getline(str(Path(file).resolve()), int(number)).strip()})" if file else ""


def _parameter(error: BaseException, model: nn.Module) -> str:
    """Return the name of the parameter that the line which raised an error names; "" if none."""
    names = {id(parameter): original_name(name) for name, parameter in model.named_parameters()}
    for frame, number in reversed([*traceback.walk_tb(error.__traceback__)]):
        for words in _CHAIN.findall(getline(frame.f_code.co_filename, number)):
            first, *rest = re.findall(r"\w+", words)
            value = frame.f_locals.get(first)
            for word in rest:
                if isinstance(value, nn.Module):
                    value = getattr(value, word, None)
            if id(value) in names:
                return names[id(value)]
    return ""


def _at_work(error: BaseException, model: nn.Module, parameter: str) -> bool:
    """Return whether the unit of a parameter was in its forward pass when an error was raised."""
    units = {f"{original_name(name)}.": m for name, m in model.named_modules() if isinstance(m, FSDPModule)}
    of_unit = [unit for name, unit in units.items() if name == "." or parameter.startswith(name)]
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(f.f_code.co_name == "forward" and f.f_locals.get("self") is of_unit[-1] for f in frames)


def _buffers(error: BaseException, model: nn.Module) -> str:
    """Return the float32 buffers of the innermost module that was at work and has some; "" if none has."""
    names = {id(module): original_name(name) for name, module in model.named_modules()}
    for frame, _ in reversed([*traceback.walk_tb(error.__traceback__)]):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and id(module) in names:
            own = [leaf for leaf, buffer in module.named_buffers(recurse=False) if buffer.dtype is torch.float32]
            if own:
                return f" (here {', '.join('.'.join(filter(None, (names[id(module)], leaf))) for leaf in own)})"
    return ""
