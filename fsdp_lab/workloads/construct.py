"""A model from its constructor: called once, as in the user's own script, or without the values of its parameters."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils import swap_tensors

Build = Callable[[], nn.Module]


class TooLarge(BaseException):
    """The parameters of a model exceed the bytes that were allowed. The user's `except Exception` does not catch it."""


def construct(build: Build, seed: int, most_bytes: float | None = None) -> nn.Module:
    """Call a constructor on the CPU after the seed, and return its model.

    Args:
        most_bytes: of its parameters; None: any number.

    Raises:
        TooLarge: there are more.
    """
    left = most_bytes

    def count(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        nonlocal left
        if left is not None and not is_lazy(parameter):
            left -= parameter.numel() * parameter.element_size()
            if left < 0:
                raise TooLarge

    with seeded(seed), torch.device("cpu"), _at_registration(count):
        return build()


def without_values(build: Build, seed: int = 0) -> nn.Module:
    """Return the model of a constructor with its parameters on `meta` and its buffers computed.

    A constructor that reads the values of parameters is called again, with them.
    """
    with seeded(seed), torch.device("cpu"), _at_registration(_to_meta):
        try:
            model = build()
        except Exception:  # noqa: BLE001 (it may need values; the second call raises other errors)
            model = None
    if model is None or any(buffer.is_meta for buffer in model.buffers()):  # a buffer is computed from parameters
        model = construct(build, seed)
    return model if all(parameter.is_meta for parameter in model.parameters()) else copy_on_meta(model)


def copy_on_meta(model: nn.Module) -> nn.Module:
    """Return a copy with parameters on `meta`. What is tied, or referred to, in the model is so in the copy.

    Raises:
        Exception: the model holds an object that cannot be copied.
    """
    attributes = (value for module in model.modules() for value in vars(module).values())
    computed = {id(x): x.detach().to("meta") for x in attributes if isinstance(x, Tensor) and not x.is_leaf}
    return copy.deepcopy(model, computed | {id(parameter): on_meta(parameter) for parameter in model.parameters()})


def on_meta(parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter on `meta` with the attributes of another."""
    made = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    vars(made).update(vars(parameter))
    return made


def _to_meta(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Move a parameter to `meta` in place, so that all who hold it still do, and later ties hold."""
    if not is_lazy(parameter) and not parameter.is_meta:
        swap_tensors(parameter, on_meta(parameter))


@contextmanager
def _at_registration(hook: Callable[[nn.Module, str, nn.Parameter], None]) -> Iterator[None]:
    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@cache
def _has_gpu() -> bool:
    return torch.cuda.is_available()


def seed_all(seed: int) -> None:
    """Seed PyTorch's generators, NumPy's and Python's.

    Every step calls this, so it avoids `torch.manual_seed`, which formats the stack of this thread for each kind of
    device that is not initialized: 0.2 ms a call.
    """
    if _has_gpu() and not torch.cuda.is_initialized():
        torch.manual_seed(seed)  # CUDA uses the seed when it is initialized
    else:
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed PyTorch's generators, NumPy's and Python's, and restore their states at the end."""
    before = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        seed_all(seed)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
