"""Follows equal blocks of a model once: the step of many blocks is made from those of a few.

Two steps are followed: one of a few blocks, and one with one more period. Repeating a period of the first step once
must give the second step. Otherwise, or if blocks differ, the whole model is followed.
"""

from __future__ import annotations

import json
import warnings
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from math import lcm
from typing import Any
from unittest import mock

from torch import Tensor, autocast, device, nn
from torch.utils.weak import WeakIdKeyDictionary

from fsdp_lab.config import TrialConfig, flatten
from fsdp_lab.config.axes.checkpointing import ActivationCheckpointing
from fsdp_lab.forecast.depth import NONE, REPEATED, Stack, deepened
from fsdp_lab.forecast.step import Step
from fsdp_lab.memory.torch_private import TorchDispatchMode
from fsdp_lab.training.blocks import find_block_classes
from fsdp_lab.workloads.base import Workload, map_tensors, tensors_of
from fsdp_lab.workloads.construct import copy_on_meta, without_values

_LONGEST = 4  # longest period that is searched
_LAST: dict[str, Stack | None] = {}


def step_of_equal_blocks(workload: Workload, config: TrialConfig, follow: Callable[[Stack | None, int], Step]) -> Step:
    """Return the step of a model. Of equal blocks, follow only a few.

    Args:
        follow: returns the step with so many blocks of a stack; None: of the whole model.
    """
    stack = None
    with suppress(Exception):  # a model without values may raise anything
        stack = _equal_blocks(workload, config)
    if stack is not None:
        with suppress(Exception):  # following the whole model raises it again, with all names
            few, more = follow(stack, stack.few), follow(stack, stack.few + stack.period)
            if (step := deepened(few, more, stack)) is not None:
                return step
    return follow(None, 0)


def keep_first(model: nn.Module, stack: Stack, count: int) -> None:
    """Remove all but the first blocks of a stack from a model, in place."""
    blocks: Any = model.get_submodule(stack.name)
    del blocks[count:]


def _equal_blocks(workload: Workload, config: TrialConfig) -> Stack | None:
    """Return a model's longest stack of blocks that are equal and used equally; None if it is too short to gain time.

    The last result of this process is cached: the settings of a grid share one model.
    """
    every = config.activation_checkpointing is ActivationCheckpointing.every_n
    apart = lcm(config.sharding.blocks_per_unit or 1, config.activation_checkpointing_every if every else 1)
    parts = [flatten(config.model), flatten(config.data), flatten(config.task), config.training.seed, apart]
    key = json.dumps(parts, sort_keys=True, default=str)
    if key not in _LAST:
        found = _compared(workload, config.training.seed, apart)
        _LAST.clear()
        _LAST[key] = found
    return _LAST[key]


def _compared(workload: Workload, seed: int, apart: int) -> Stack | None:
    """Return the stack of a model with a period that is a multiple of `apart`."""
    model = without_values(workload.model.build, seed)
    lists = {name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList | nn.Sequential)}
    name = max(lists, key=lambda name: len(lists[name]), default="")
    if not name or _shares(model, lists[name]):
        return None
    looks = [_look(block) for block in lists[name]]
    equal = (p for p in range(1, _LONGEST + 1) if all(map(partial(_alike, apart=p), looks, looks[p:])))
    period = lcm(next(equal, 0), apart)
    stack = Stack(name, len(looks), period)
    if not period or stack.count <= 3 * stack.few:  # two steps are followed, and this comparison takes time, too
        return None
    short = copy_on_meta(model)
    keep_first(short, stack, stack.few)
    if workload.model.block_classes is None and find_block_classes(short) != find_block_classes(model):
        return None
    few = _step(short, workload, stack)
    all_ = {label + stack.more if label > REPEATED else label: seen for label, seen in few.items()}
    all_ |= {REPEATED + later: few[REPEATED] for later in range(1, stack.more + 1)}
    return stack if all_ == _step(model, workload, stack) else None


def _look(block: nn.Module) -> dict[str, object]:
    """Return what equal blocks have in common: classes, shapes and plain attributes of their modules."""
    look: dict[str, object] = {}
    for name, module in block.named_modules():
        look[name] = type(module)
        for key, value in vars(module).items():
            if key in ("_parameters", "_buffers"):
                look |= {f"{name}.{leaf}": _plain_look(tensor) for leaf, tensor in value.items()}
            elif key != "_modules":
                look[f"{name}.{key}"] = _plain_look(value)
    return look


def _plain_look(value: object) -> object:
    if isinstance(value, partial):
        return value.func, value.args, value.keywords
    if not isinstance(value, Tensor):
        return value
    return type(value), value.shape, value.stride(), value.dtype, value.requires_grad, [*vars(value)]


def _alike(one: dict[str, object], other: dict[str, object], apart: int) -> bool:
    """Return whether two blocks look alike, except for integers that may be their positions in the stack."""
    return one.keys() == other.keys() and all(
        a is b or (type(a) is type(b) and (a == b or (type(a) is int and b - a == apart)))  # type: ignore[operator]
        for a, b in zip(one.values(), other.values(), strict=True)
    )


def _shares(model: nn.Module, blocks: nn.Module) -> bool:
    """Return whether a parameter of a block is used elsewhere, too."""
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    return any(uses[id(parameter)] > 1 for parameter in blocks.parameters())


class _Operators(TorchDispatchMode):
    """Notes the operators of a step by the period of the last entered block, and which results stay alive.

    An argument is noted by the operator that made it: its number in its period, and how many periods before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.at, self.seen = NONE, defaultdict[int, list[Any]](list)
        self._made: Any = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        made, of_period = tensors_of(result), self.seen[self.at]
        look = f"{func} {map_tensors(self._look, [list(args), kwargs or {}])}"
        of_period.append((look, [weakref.ref(tensor) for tensor in made]))
        for tensor in made:
            self._made.setdefault(tensor, (len(of_period), self.at))
        return result

    @contextmanager
    def noting_casts(self) -> Iterator[None]:
        """Note the autocast contexts that are created inside: no dispatch mode sees when one is entered."""
        make = autocast.__init__

        def init(context: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
            self.seen[self.at].append((f"autocast {device_type} {args} {kwargs}", []))
            make(context, device_type, *args, **kwargs)

        with mock.patch.object(autocast, "__init__", init), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no GPU
            yield

    def _look(self, tensor: Tensor) -> str:
        number, at = self._made.get(tensor, (0, NONE))
        before = "" if at == NONE else f"@{self.at - at}"
        return f"{tensor.dtype}{[*tensor.shape]}{tensor.requires_grad}{number}{before}"

    def summary(self) -> dict[int, list[tuple[str, bool]]]:
        """Return each operator, and whether its results are still alive."""
        return {
            at: [(look, any(one() is not None for one in made)) for look, made in some]
            for at, some in self.seen.items()
        }


def _step(model: nn.Module, workload: Workload, stack: Stack) -> dict[int, list[tuple[str, bool]]]:
    """Return the operators of a forward and a backward pass on `meta`, by the period of the blocks."""
    operators, model = _Operators(), model.to("meta").train()

    def enter(at: int) -> None:
        operators.at = at

    def left(outputs: Any, at: int) -> None:
        for tensor in tensors_of(outputs):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: enter(at))

    for place, block in enumerate(model.get_submodule(stack.name).children()):
        block.register_forward_pre_hook(lambda *_, at=place // stack.period: enter(at))
        block.register_forward_hook(lambda _, given, outputs, at=place // stack.period: left(outputs, at))
    with device("meta"):
        batch = workload.data.example_batch(2)
    with operators.noting_casts(), operators:
        loss = workload.task.loss(workload.task.forward(model, batch), batch)
        (loss[0] if isinstance(loss, tuple) else loss).backward()
    return operators.summary()
