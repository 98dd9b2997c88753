"""What a forward pass may change besides gradients: buffers, numbers that modules count, and random generators."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

_PLAIN = (int, float, bool, type(None))
State = tuple[dict[str, Tensor], list[tuple[nn.Module, dict[str, Any]]], list[tuple[Any, Any]]]


def state_of(model: nn.Module) -> State:
    """Return copies of the buffers by name, of each module's numbers and flags, and of its own generators' states."""
    wrappers = (FullyShardedDataParallel, DistributedDataParallel)  # which count for themselves
    modules = [module for module in model.modules() if not isinstance(module, wrappers)]
    numbers = [(module, _numbers(module)) for module in modules]
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    return buffers, numbers, _own_generators(modules)


def _numbers(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if type(value) in _PLAIN and name != "training"}


def _own_generators(modules: Iterable[nn.Module]) -> list[tuple[Any, Any]]:
    found = (value for module in modules for value in vars(module).values())
    return [(each, _state(each)) for each in found if isinstance(each, torch.Generator | random.Random)]


def _state(generator: torch.Generator | random.Random) -> Any:
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


@torch.no_grad()
def put_back(model: nn.Module, state: State) -> None:
    """Give a model the buffers, numbers and generators of a state."""
    buffers, numbers, own_generators = state
    for name, buffer in model.named_buffers():
        if name in buffers and buffers[name].shape == buffer.shape:
            buffer.copy_(buffers[name])
    for module, values in numbers:
        vars(module).update(values)
    for generator, value in own_generators:
        generator.setstate(value) if isinstance(generator, random.Random) else generator.set_state(value)


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def generators(model: nn.Module) -> bytes:
    """Return the states of all random generators, of those of a model's own, too."""
    own = [
        str(_state(each)) if isinstance(each, random.Random) else each.get_state().numpy()
        for each, _ in _own_generators(model.modules())
    ]
    cuda = [state.numpy() for state in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else []
    return pickle.dumps((random.getstate(), np.random.get_state(), torch.get_rng_state().numpy(), cuda, own))
