"""A model's constructor, run once without the values of its parameters, and again for the values.

The constructor alone decides the first weights: no initial distribution is written down a second time.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cache
from types import TracebackType

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils import swap_tensors

from fsdp_lab.config.errors import ModelError

_HOST = torch.device("cpu")
GROUP_BYTES = 4 * 2**30  # of values at a time; a smaller model starts with those of one plain call of its constructor


# PyTorch's messages about a tensor without values, and about one that cannot be replaced because of a weak reference.
_WANTS_VALUES = re.compile(r"\bmeta\b|weakref")


class ValuesNeeded(Exception):
    """The constructor reads the values of a parameter.

    Attributes:
        module: the name of the class that does.
        reason: PyTorch's message.
    """

    def __init__(self, module: str, reason: str) -> None:
        super().__init__(f"{module}: {reason}")
        self.module, self.reason = module, reason


class Blueprint:
    """A model whose parameters are on `meta`, and the source of their values.

    Parameters go to `meta` as modules register them, so a model of any size can be built on any machine. Buffers are
    computed for real, on the CPU. The values are those that the constructor gives after `torch.manual_seed(seed)`.

    If the values exceed `group_bytes`, the constructor runs once for each group of parameters, with a seed for each
    group. A constructor that copies modules runs once for all, because a copy has values only together with its
    original.

    Args:
        seed: of all generators while it runs.
        whole: build all values in one piece, for a constructor that reads them. Without it, reading them is an error.
        group_bytes: the most bytes of values at a time.

    Raises:
        ValuesNeeded: the constructor reads a value without `whole`.
        ModelError: a parameter has no size yet.
    """

    def __init__(
        self, build: Callable[[], nn.Module], seed: int, whole: bool = False, group_bytes: int = GROUP_BYTES
    ) -> None:
        self._build, self._seed, self._group_bytes = build, seed, group_bytes
        self.model, registered, copied = self._construct(seed, () if not whole else None)
        self._in_one = whole or copied
        _check_buffers(self.model)
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        # By number of registration. What the constructor has replaced has no name, but took random numbers, too.
        self._names = [names.get(id(parameter), "") for parameter in registered]
        self._sizes = [parameter.numel() * parameter.element_size() for parameter in registered]
        if whole:
            _all_to_meta(self.model)

    @property
    def names(self) -> list[str]:
        """The parameters in the order of `values`."""
        return [name for name in self._names if name]

    def values(self, device: torch.device = _HOST) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the first value of every parameter; of tied ones only under the first name.

        Args:
            device: where the constructor computes. Its generator decides the values.
        """
        for number, group in enumerate(self._groups()):
            # a seed of its own, or equal layers in two groups would be equal
            seed = self._seed if number == 0 else zlib.crc32(f"{self._seed}/{number}".encode())
            _, registered, _ = self._construct(seed, group, device)
            for parameter in group:
                if self._names[parameter]:
                    yield self._names[parameter], registered[parameter].detach()

    def _groups(self) -> list[list[int]]:
        """Return the parameters in the order of their registration, in groups of limited size."""
        groups: list[list[int]] = [[]]
        left = self._group_bytes
        for number, size in enumerate(self._sizes):
            if groups[-1] and size > left and not self._in_one:
                groups.append([])
                left = self._group_bytes
            groups[-1].append(number)
            left -= size
        return groups

    def _construct(
        self, seed: int, real: Collection[int] | None, device: torch.device = _HOST
    ) -> tuple[nn.Module, list[nn.Parameter], bool]:
        """Return the model, its parameters, and whether no module has registered some of them.

        Args:
            real: the parameters that keep their values, by number; None: all.
        """
        with seeded(seed), device, _registering(real) as (registered, note):
            try:
                model = self._build()
                count = len(registered)
                for parameter in model.parameters():  # what was copied with its module, or put in place otherwise
                    note(parameter)
            except (RuntimeError, TypeError) as error:  # a TypeError is NumPy's way to ask
                if real is None or not _WANTS_VALUES.search(str(error)):
                    raise
                raise ValuesNeeded(_raised_in(error.__traceback__), " ".join(str(error).split())) from error
        return model, [*registered.values()], len(registered) > count


def _to_meta(parameter: nn.Parameter) -> None:
    """In place, so that whoever holds the parameter still does: a tie made later is a tie."""
    swap_tensors(parameter, nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad))


def _all_to_meta(model: nn.Module) -> None:
    """By new parameters, for some cannot be changed in place: nn.LSTM watches its own. Ties stay."""
    without: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, old in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(old) not in without:
                without[id(old)] = nn.Parameter(old.detach().to("meta"), old.requires_grad)
            setattr(module, name, without[id(old)])


def _check_buffers(model: nn.Module) -> None:
    """Check that buffers have values and sizes.

    Raises:
        ValuesNeeded: a buffer was computed from parameters, so it has no values either.
        ModelError: a buffer has no size yet.
    """
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            _check_size(module, buffer)
            if buffer.is_meta:
                raise ValuesNeeded(type(module).__name__, f"the buffer {name} is computed from them")


def _check_size(module: nn.Module, tensor: Tensor) -> None:
    """Check that a tensor has a size.

    Raises:
        ModelError: it gets its size from the first batch only.
    """
    if is_lazy(tensor):
        kind = type(module).__name__
        raise ModelError(
            f"the model has a {kind}, whose parameters get their size from the first batch, but fsdp_lab shards them "
            f"before it; use {kind.replace('Lazy', '')} with that size."
        )


def _raised_in(trace: TracebackType | None) -> str:
    """Return the class of the module in whose code an error was raised; one of PyTorch's only if there is no other."""
    modules: list[type[nn.Module]] = []
    while trace is not None:
        code, here = trace.tb_frame.f_code, trace.tb_frame.f_locals
        first = here.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(first, nn.Module):
            modules.append(type(first))
        trace = trace.tb_next
    users = [kind for kind in modules if not kind.__module__.startswith("torch.")]
    return (users or modules or [nn.Module])[-1].__name__


@contextmanager
def _registering(
    real: Collection[int] | None,
) -> Iterator[tuple[dict[int, nn.Parameter], Callable[[nn.Parameter], None]]]:
    """Let modules note their parameters: yield those by id, in the order of registration, and what notes one.

    A parameter goes to `meta` unless it keeps its values, see `Blueprint._construct`.
    """
    registered: dict[int, nn.Parameter] = {}
    kept = None if real is None else frozenset(real)
    register = nn.Module.register_parameter

    def note(parameter: nn.Parameter) -> None:
        if id(parameter) in registered:
            return
        if kept is not None and len(registered) not in kept and not parameter.is_meta:
            _to_meta(parameter)
        registered[id(parameter)] = parameter

    def register_and_note(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None:
            _check_size(module, parameter)
            if isinstance(parameter, DTensor):
                raise ModelError(
                    f"the parameter {name} of {type(module).__name__} is already a DTensor; fsdp_lab shards parameters "
                    "itself: make it a plain tensor."
                )
            note(parameter)

    nn.Module.register_parameter = register_and_note  # type: ignore[assignment,method-assign]
    try:
        yield registered, note
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@cache
def _has_gpu() -> bool:
    return torch.cuda.is_available()


def seed_all(seed: int) -> None:
    """Seed PyTorch's generators, NumPy's and Python's.

    Every step calls this, so it avoids `torch.manual_seed`, which formats the stack of this thread for each kind of
    device that is not initialized: 0.2 ms a call.
    """
    if _has_gpu() and not torch.cuda.is_initialized():
        torch.manual_seed(seed)  # CUDA takes the seed when it is initialized
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
