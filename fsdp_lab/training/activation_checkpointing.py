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
        if context_fn is noop_context_fn:
            return checkpoint_wrapper(block)  # the compiler knows no default that is typed
        return checkpoint_wrapper(block, context_fn=context_fn)
    return checkpoint_wrapper(block, checkpoint_fn=_StateKept(context_fn))


Attributes = list[tuple[dict[str, Any], dict[str, Any]]]  # of each module: what it has now, and what it had


@dataclass(frozen=True)
class _Held:
    """A buffer or other tensor before a forward pass; `copy`: its values, if they may change in place."""

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
    """Checkpoints a block. Its buffers and attributes change in the forward pass alone, as without checkpointing.

    The recomputation gets them as they were before the forward pass: it computes the same, and what it writes is
    dropped.
    """

    def __init__(self, context_fn: Callable[[], Any]) -> None:
        self._contexts = context_fn
        self._written: dict[tuple[nn.Module, str], bool] = {}  # whether a tensor changes in place, once it was seen

    def __call__(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = self._once(block) if torch.is_grad_enabled() else block
        return checkpoint(run, *args, use_reentrant=False, context_fn=self._contexts, **kwargs)

    def _once(self, block: nn.Module) -> Callable[..., Any]:
        held, attributes = self._hold(block), _attributes(block)
        changed: list[_Held] | None = None

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal held, changed
            if changed is None:
                is_new = any((each.holder, each.name) not in self._written for each in held)
                with _Norms() if is_new else nullcontext() as norms:
                    outputs = block(*args, **kwargs)
                changed, held = self._changed(held, norms.arguments if norms else set()), []
                return outputs
            before = changed
            if self._contexts is noop_context_fn:  # a graph that is kept is computed again, from the same copies
                before = [replace(each, copy=None if each.copy is None else each.copy.clone()) for each in changed]
            with _as_before(before, attributes):
                return block(*args, **kwargs)

        return run

    def _hold(self, block: nn.Module) -> list[_Held]:
        held = []
        for holder in block.modules():
            for name, tensor in _tensors(holder):
                now = _alone(tensor)
                may_change = self._written.get((holder, name), True) and not _is_of_weights(tensor)
                held.append(_Held(holder, name, now, version_of(now), now.clone() if may_change else None))
        return held

    def _changed(self, held: list[_Held], of_norms: set[int]) -> list[_Held]:
        changed = []
        for each in held:
            key = each.holder, each.name
            is_written = version_of(each.buffer) != each.version or id(each.buffer) in of_norms
            self._written[key] = self._written.get(key, False) or is_written
            if self._written[key] or getattr(*key, None) is not each.buffer:
                changed.append(each)
        return changed


def _is_users(module: nn.Module) -> bool:
    """Return whether a class is a user's, also where PyTorch made one of it (FSDP2, parametrizations)."""
    return not all(kind.__module__.startswith(("torch.", "builtins")) for kind in type(module).__mro__)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_buffers(recurse=False, remove_duplicate=False)
    if _is_users(module):
        yield from ((name, value) for name, value in vars(module).items() if isinstance(value, Tensor))


def _attributes(block: nn.Module) -> Attributes:
    """Return the attributes of each user's module, and what they are before the forward pass, `...`: not known."""
    return [
        (own, {name: _alone(value) if isinstance(value, _KEPT) else ... for name, value in own.items()})
        for own in (vars(module) for module in block.modules() if _is_users(module))
    ]


def _is_of_weights(tensor: Tensor) -> bool:
    """Return whether a tensor has a graph, or is a view of a weight that FSDP2 has freed."""
    is_dense = tensor.layout is torch.strided
    return tensor.grad_fn is not None or (is_dense and tensor.untyped_storage().size() < tensor.nbytes)


def _alone(value: Any) -> Any:
    """Return a value without its graph, which would live until this step's ends, and so would those before it."""
    if type(value) is tuple:
        return tuple(map(_alone, value))
    return value.detach().requires_grad_() if isinstance(value, Tensor) and value.grad_fn is not None else value


@contextmanager
def _as_before(changed: list[_Held], attributes: Attributes) -> Iterator[None]:
    buffers_now = [getattr(each.holder, each.name, None) for each in changed]
    attributes_now = [dict(own) for own, _ in attributes]
    for own, before in attributes:
        for name in own.keys() - before.keys():  # made in the forward pass
            del own[name]
        own.update({name: value for name, value in before.items() if value is not ...})
    for each in changed:
        setattr(each.holder, each.name, each.buffer if each.copy is None else each.copy)
    try:
        yield
    finally:
        for each, buffer in zip(changed, buffers_now, strict=True):
            setattr(each.holder, each.name, buffer)
        for (own, _), now in zip(attributes, attributes_now, strict=True):
            own.clear()
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
_KEPT = (int, float, str, tuple, Tensor, type(None))  # a list or another object may change inside
