"""The random generators of a process, and of modules in any attribute."""

from __future__ import annotations

import gc
import pickle
import random
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Access = tuple[Callable[[], Any], Callable[[Any], None]]  # functions that read and set a generator's state
_KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
PROCESS: tuple[Access, ...] = ((random.getstate, random.setstate), (np.random.get_state, np.random.set_state))
_OF_EVERY_MODULE = vars(nn.Module()).keys()  # skipped: hooks lead to all of FSDP2
_MOST_OBJECTS = 100_000  # how many objects are searched at most


def generators_of(modules: Iterable[nn.Module]) -> list[Access]:
    """Return the generators that the attributes of modules lead to, each once."""
    modules = [*modules]
    seen = {id(module) for module in modules}
    values = [value for module in modules for name, value in vars(module).items() if name not in _OF_EVERY_MODULE]
    return [*{id(each): access(each) for each in reached(values, seen, _KINDS) if has_state(each)}.values()]


def has_state(value: Any) -> bool:
    """Return whether a value is a generator whose state can be set; the system's cannot."""
    return isinstance(value, _KINDS) and not isinstance(value, random.SystemRandom)


def access(generator: Any) -> Access:
    """Return how the state of a generator is read and set."""
    if isinstance(generator, np.random.Generator):
        bits: Any = generator.bit_generator
        return lambda: bits.state, lambda state: setattr(bits, "state", state)
    if isinstance(generator, random.Random):
        return generator.getstate, generator.setstate
    return generator.get_state, generator.set_state


def in_bytes(state: Any) -> bytes:
    """Return the state of a generator in a form that can be compared."""
    return bytes(state.numpy()) if isinstance(state, Tensor) else pickle.dumps(state)


def reached(value: Any, seen: set[int], kinds: Any) -> Iterator[Any]:
    """Yield the objects of some kinds inside a value: in containers, objects and closures.

    Args:
        seen: ids of objects to skip; the ids of searched objects are added.
    """
    left = [value]
    while left and len(seen) < _MOST_OBJECTS:
        found = left.pop()
        if isinstance(found, kinds):
            yield found
        elif gc.is_tracked(found) and id(found) not in seen and not isinstance(found, type | ModuleType | Tensor):
            seen.add(id(found))
            is_function = isinstance(found, FunctionType)  # its globals are no part of a model
            left += [found.__closure__, found.__defaults__] if is_function else gc.get_referents(found)
