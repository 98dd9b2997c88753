"""What a plain loop may use of a machine that others use, too."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from fsdp_lab.config import TrialConfig
from fsdp_lab.machine import hardware


class Stopped(BaseException):  # no Exception, which the user's code might catch
    """The loop lacks memory or time, or the model needs several processes."""


class Late(Stopped):
    """The loop has taken all its time."""


class Deadline:
    """The time so many seconds from now."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s, self._end = limit_s, time.monotonic() + limit_s

    def check(self) -> None:
        """Stop if it is over."""
        if time.monotonic() > self._end:
            raise Late(f"took more than {self._limit_s:g} s, the rest of check.limit_s")


@contextmanager
def limited(config: TrialConfig, free_bytes: float) -> Iterator[None]:
    """Stop a constructor whose weights, gradients, optimizer state and first weights need more memory."""
    copies = 3 + {"sgd": int(config.optimizer.momentum > 0)}.get(config.optimizer.name.name, 2)
    sizes: dict[int, int] = {}

    def count(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        sizes[id(parameter)] = parameter.nbytes
        if copies * sum(sizes.values()) > free_bytes:
            raise Stopped(f"needs more than the {free_bytes / 2**30:.1f} GiB that are free")

    handle = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()


def free_memory(device: torch.device) -> float:
    """Return the free bytes of the host, or of a GPU if they are fewer: a model is made on the host."""
    on_host = hardware.free_memory()
    return min(on_host, torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else on_host
