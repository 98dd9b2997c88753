"""PyTorch's errors about what is sharded, with the line of the user's code and a remedy."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from linecache import getline
from pathlib import Path

from torch import nn

from fsdp_lab.config.errors import ModelError, UserError
from fsdp_lab.config.parallel import Dtype
from fsdp_lab.config.target import user_line
from fsdp_lab.config.trial import TrialConfig
from fsdp_lab.workloads.base import original_name

MIXED = "mixed torch.Tensor and DTensor"
_NO_RULE = ("Sharding propagation failed", "sharding strategy")  # of DTensor
_CHAIN = re.compile(r"[A-Za-z_]\w*(?:\.\w+|\[\d+\])*")  # such as self.blocks[0].weight
_NO_KERNEL = re.compile("(not implemented for '|Unsupported dtype )(B?Float16|Half)")


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
            f"the step of optimizer._target_={config.optimizer.target} fails{at(error)}: {type(error).__name__} "
            f"{error}. fsdp_lab calls step() without arguments, once after the backward pass; use an optimizer that "
            "needs none."
        ) from error
    except (RuntimeError, NotImplementedError) as error:
        if config.optimizer.target is None or not any(words in str(error) for words in (*_NO_RULE, MIXED)):
            raise
        raise UserError(
            f"sharding={config.sharding.granularity.name}: PyTorch cannot take the step of "
            f"optimizer._target_={config.optimizer.target} with sharded parameters{at(error)}: "
            f"{str(error).strip().partition(chr(10))[0]} Let it work on x.full_tensor(), or use another optimizer, or "
            "sharding=ddp, which keeps parameters whole."
        ) from error


def in_16_bits(error: Exception, config: TrialConfig) -> ModelError | None:
    """Return why an operator has no kernel for 16 bits; None: that is not what the error says."""
    param_dtype, cause = config.precision.param_dtype, error.__cause__ or error
    if param_dtype is Dtype.float32 or not _NO_KERNEL.search(str(cause)):
        return None
    return ModelError(
        f"precision.param_dtype={param_dtype.value}: {str(cause).rstrip('.')}{at(cause)}. PyTorch does not compute "
        f"this in {param_dtype.value} on this device: do it in float32, as f(x.float()).to(x.dtype), or use "
        "precision=fp32."
    )


def at(error: BaseException) -> str:
    """Return the user's line that raised an error, with its text; "" if none did."""
    file, _, number = user_line(error).rpartition(":")
    return f" ({file}:{number}: {getline(str(Path(file).resolve()), int(number)).strip()})" if file else ""


def parameter_named(error: BaseException, model: nn.Module) -> str:
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
