"""What a forward pass may change besides gradients: buffers, numbers that modules count, and random generators."""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from fsdp_lab.workloads.generators import Access, generators_of, in_bytes

_PLAIN = (int, float, bool, type(None))
State = tuple[dict[str, Tensor], list[tuple[nn.Module, dict[str, Any]]], list[tuple[Access, Any]]]


def state_of(model: nn.Module) -> State:
    """Return copies of the buffers by name, of each module's numbers and flags, and of its own generators' states."""
    wrappers = (FullyShardedDataParallel, DistributedDataParallel)  # their own numbers are left out
    modules = [module for module in model.modules() if not isinstance(module, wrappers)]
    numbers = [(module, _numbers(module)) for module in modules]
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    return buffers, numbers, [(each, each[0]()) for each in generators_of(modules)]


def _numbers(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if type(value) in _PLAIN and name != "training"}


@torch.no_grad()
def put_back(model: nn.Module, state: State) -> None:
    """Give a model the buffers, numbers and generators of a state."""
    buffers, numbers, own_generators = state
    for name, buffer in model.named_buffers():
        if name in buffers and buffers[name].shape == buffer.shape:
            buffer.copy_(buffers[name])
    for module, values in numbers:
        vars(module).update(values)
    for (_, put), value in own_generators:
        put(value)


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def generators(model: nn.Module) -> bytes:
    """Return the states of all random generators, of those of a model's own, too."""
    own = [in_bytes(read()) for read, _ in generators_of(model.modules())]
    cuda = [state.numpy() for state in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else []
    return pickle.dumps((random.getstate(), np.random.get_state(), torch.get_rng_state().numpy(), cuda, own))
