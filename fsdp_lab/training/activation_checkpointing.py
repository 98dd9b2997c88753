"""Which blocks are recomputed in the backward pass, which outputs of their operators are saved, and their buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from fsdp_lab.config.errors import ModelError
from fsdp_lab.config.training import MATRIX_PRODUCTS, SAVED_OPERATORS, ActivationCheckpointing
from fsdp_lab.config.trial import TrialConfig
from fsdp_lab.training.torch_private import checkpoint_wrapper, version_of


def checkpoint_blocks(blocks: Sequence[nn.Module], config: TrialConfig) -> list[nn.Module]:
    """Return the replacement of each block: its wrapper, or the block itself if it is not recomputed."""
    match config.activation_checkpointing:
        case ActivationCheckpointing.none:
            return list(blocks)
        case ActivationCheckpointing.full:
            return [_wrapped(block, config) for block in blocks]
        case ActivationCheckpointing.every_n:
            every = config.activation_checkpointing_every
            return [block if i % every else _wrapped(block, config) for i, block in enumerate(blocks, 1)]
        case ActivationCheckpointing.selective:
            return [_wrapped(block, config, context_fn=selective_contexts) for block in blocks]
        case _:
            raise ValueError(f"activation_checkpointing={config.activation_checkpointing} is not known")


def _wrapped(block: nn.Module, config: TrialConfig, context_fn: Callable[[], Any] = noop_context_fn) -> nn.Module:
    if config.compile:  # compiled code writes buffers in the forward pass alone
        return checkpoint_wrapper(block, context_fn=context_fn)
    return checkpoint_wrapper(block, checkpoint_fn=_StateKept(context_fn))


@dataclass(frozen=True)
class _Held:
    """A buffer before a forward pass; `copy`: its values, if they may change in place."""

    holder: nn.Module
    name: str
    buffer: Tensor
    version: int
    copy: Tensor | None


class _Norms(TorchFunctionMode):
    """Collects the arguments of normalisations, which write running statistics without a new version."""

    def __init__(self) -> None:
        super().__init__()
        self.arguments: set[int] = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if "norm" in getattr(func, "__name__", ""):
            self.arguments |= {id(argument) for argument in (*args, *(kwargs or {}).values())}
        return func(*args, **(kwargs or {}))


class _StateKept:
    """Checkpoints a block. Its buffers and numbers change in the forward pass alone, as without checkpointing.

    The recomputation gets them as they were before the forward pass: it computes the same, and what it writes is
    dropped.
    """

    def __init__(self, context_fn: Callable[[], Any]) -> None:
        self._contexts = context_fn
        self._written: set[tuple[nn.Module, str]] | None = None  # buffers that change in place; None: not known yet

    def __call__(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = self._once(block) if torch.is_grad_enabled() else block
        return checkpoint(run, *args, use_reentrant=False, context_fn=self._contexts, **kwargs)

    def _once(self, block: nn.Module) -> Callable[..., Any]:
        held, numbers = self._hold(block), _numbers(block)
        changed: list[_Held] | None = None

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal held, changed
            if changed is None:
                with _Norms() if self._written is None else nullcontext() as norms:
                    outputs = block(*args, **kwargs)
                changed, held = self._changed(held, norms.arguments if norms else set()), []
                return outputs
            before = changed
            if self._contexts is noop_context_fn:  # a graph that is kept is computed again, from the same copies
                before = [replace(each, copy=None if each.copy is None else each.copy.clone()) for each in changed]
            with _as_before(before, numbers):
                return block(*args, **kwargs)

        return run

    def _hold(self, block: nn.Module) -> list[_Held]:
        return [
            _Held(holder, name, buffer, version_of(buffer), buffer.clone() if self._may_change(holder, name) else None)
            for holder in block.modules()
            for name, buffer in holder.named_buffers(recurse=False, remove_duplicate=False)
        ]

    def _may_change(self, holder: nn.Module, name: str) -> bool:
        return self._written is None or (holder, name) in self._written

    def _changed(self, held: list[_Held], of_norms: set[int]) -> list[_Held]:
        written = [each for each in held if version_of(each.buffer) != each.version or id(each.buffer) in of_norms]
        self._written = {(each.holder, each.name) for each in written} | (self._written or set())
        return [
            each
            for each in held
            if (each.holder, each.name) in self._written or getattr(each.holder, each.name, None) is not each.buffer
        ]


def _numbers(block: nn.Module) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the attributes of each user's module, and those that are numbers, such as a counter of calls."""
    users = [vars(module) for module in block.modules() if not type(module).__module__.startswith("torch.")]
    return [(own, {k: v for k, v in own.items() if isinstance(v, (int, float))}) for own in users]


@contextmanager
def _as_before(changed: list[_Held], numbers: list[tuple[dict[str, Any], dict[str, Any]]]) -> Iterator[None]:
    buffers_now = [getattr(each.holder, each.name) for each in changed]
    numbers_now = [{name: own[name] for name in before if name in own} for own, before in numbers]
    for each in changed:
        setattr(each.holder, each.name, each.buffer if each.copy is None else each.copy)
    for own, before in numbers:
        own.update(before)
    try:
        yield
    finally:
        for each, buffer in zip(changed, buffers_now, strict=True):
            setattr(each.holder, each.name, buffer)
        for (own, _), now in zip(numbers, numbers_now, strict=True):
            own.update(now)


def check_no_unit_inside(model: nn.Module, units: Sequence[nn.Module]) -> None:
    """Check that no wrapped block has a sharding unit inside, whose gathering would count among its operators.

    Raises:
        ModelError: a block has one.
    """
    wrapped = [module for module in model.modules() if hasattr(module, "checkpoint_fn")]
    inside = {id(module) for wrapper in wrapped for module in wrapper.modules() if module is not wrapper}
    if any(id(unit) in inside for unit in units):
        raise ModelError(
            "activation_checkpointing=selective: a block has sharding units inside, so it cannot be recomputed; name "
            "only the outer blocks with model.block_classes=[...], or use activation_checkpointing=full."
        )


def selective_contexts() -> Any:
    """Return the contexts of a block's forward pass and of its recomputation.

    By torchtitan's rule the outputs of expensive operators are saved, and of matrix products every second one. A layer
    with a bias is `addmm`, which torchtitan's models lack; it counts as a matrix product here.
    """
    seen = {False: 0, True: 0}  # matrix products, of the forward pass and of the recomputation

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in _PRODUCTS:
            seen[ctx.is_recompute] += 1
            saved = seen[ctx.is_recompute] % 2 == 1
        else:
            saved = op in _SAVED
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _operators(names: Sequence[str]) -> frozenset[Any]:
    """Return the operators of these names below `torch.ops`; names that this PyTorch lacks are skipped."""
    operators = set()
    for name in names:
        with suppress(AttributeError):
            operators.add(attrgetter(name)(torch.ops))
    return frozenset(operators)


_PRODUCTS = _operators(MATRIX_PRODUCTS)
_SAVED = _operators(SAVED_OPERATORS)
