"""PyTorch's errors about what is sharded, told with the names of the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from linecache import getline
from pathlib import Path
from traceback import walk_tb

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdp_lab.config.errors import ModelError
from fsdp_lab.config.parallel import Dtype
from fsdp_lab.config.target import user_line
from fsdp_lab.config.trial import TrialConfig

_FREED = "out of bounds for storage of size 0"
_MIXED = "mixed torch.Tensor and DTensor"
_TYPES = ("must have the same dtype", "expected scalar type", "should be the same")


@contextmanager
def sharding_explained(model: nn.Module, config: TrialConfig) -> Iterator[None]:
    """Explain an error of a forward or backward pass that comes from how FSDP2 shards.

    Raises:
        ModelError: a tensor of freed parameters was used, parameters were used outside of their unit, or types differ
            because FSDP2 casts.
    """
    try:
        yield
    except (RuntimeError, ModelError) as error:
        why = _why(error, model, config) if isinstance(model, FSDPModule) else None
        if why is None:
            raise
        raise ModelError(why) from error


def _why(error: Exception, model: nn.Module, config: TrialConfig) -> str | None:
    text, sharding = str(error), f"sharding={config.sharding.granularity.name}"
    cause = error.__cause__ or error
    at = _at(cause)
    outside = _used_outside(cause, model) if _MIXED in text else ""
    if outside:
        return (
            f"{sharding}: {outside}{at}, but FSDP2 gathers the weights of a unit for its forward pass only; name its "
            "method with model.forward_methods=[...], call the module that holds the weight, or use a coarser "
            "sharding, such as root."
        )
    if _FREED in text or _MIXED in text:
        return (
            f"{sharding} reshard_after_forward={config.reshard_after_forward.policy.name}: a tensor of {_freed(model)} "
            f"is used after its parameters were freed{at}. FSDP2 gathers them again for tensors that a forward pass "
            "returns: return it as a tensor or in a container, .clone() a view, or use reshard_after_forward=never."
        )
    param_dtype = config.precision.param_dtype
    if param_dtype is not Dtype.float32 and any(words in text for words in _TYPES):
        return (
            f"precision.param_dtype={param_dtype.value}: {text.rstrip('.')}. FSDP2 casts parameters and inputs to "
            f"{param_dtype.value}, and no buffers or what forward makes: cast these there, as buffer.to(x.dtype), or "
            "use precision=fp32 or sharding=ddp."
        )
    return None


def _at(error: BaseException) -> str:
    """Return the user's line that raised an error, with its text; "" if none did."""
    file, _, number = user_line(error).rpartition(":")
    return f" ({file}:{number}: {getline(str(Path(file).resolve()), int(number)).strip()})" if file else ""


def _names(model: nn.Module, kind: type[nn.Module] | type[FSDPModule]) -> dict[nn.Module, str]:
    return {m: name for name, m in model.named_modules() if isinstance(m, kind) and isinstance(m, nn.Module)}


def _freed(model: nn.Module) -> str:
    """Return the unit whose backward pass is next: the last one that is sharded and has no gradient yet."""
    waiting = [
        f"the unit {name}" if name else "the root unit"
        for unit, name in _names(model, FSDPModule).items()
        if (own := [p for p in unit.parameters() if p.requires_grad])
        and all(isinstance(p, DTensor) and p.grad is None for p in own)
    ]
    return f"{waiting[-1]}, it seems," if waiting else "a unit"


def _used_outside(error: BaseException, model: nn.Module) -> str:
    """Return what of which unit is used outside of its forward pass; "" if it is in its own, which is recomputed."""
    names, units = _names(model, nn.Module), _names(model, FSDPModule).values()

    def unit_of(name: str) -> str:
        return max((unit for unit in units if unit and f"{name}.".startswith(f"{unit}.")), key=len, default="")

    at_work = [
        (names[owner], frame.f_code.co_name)
        for frame, _ in walk_tb(error.__traceback__)
        if isinstance(owner := frame.f_locals.get("self"), nn.Module) and owner in names
    ]
    if at_work and (unit := unit_of(at_work[-1][0])):
        entered, method = next((name, method) for name, method in at_work if unit_of(name) == unit)
        if entered == unit and method == "forward":  # a recomputation, without the hooks of a call
            return ""
        called = f".{method}()" if entered == unit else f", whose {entered[len(unit) + 1 :]}"
        return f"the unit {unit}{called} is called from outside"
    return "a weight of a unit is used outside of it"
