"""Recompute blocks in the backward pass: which ones, which outputs are saved, and what happens to buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fsdp_lab.config.axes.activation_offload import ActivationOffload
from fsdp_lab.config.axes.checkpointing import ActivationCheckpointing
from fsdp_lab.config.errors import ModelError
from fsdp_lab.config.training import MATRIX_PRODUCTS, SAVED_OPERATORS
from fsdp_lab.config.trial import TrialConfig
from fsdp_lab.memory.torch_private import version_of, without_modes
from fsdp_lab.workloads.generators import PROCESS, Access, access, generators_of, has_state, in_bytes

Key = tuple[nn.Module, str]  # a module and the name of what it has
_GONE = object()


def checkpoint_blocks(blocks: Sequence[nn.Module], config: TrialConfig) -> None:
    """Let the backward pass compute the forward pass of some of these blocks again. In place, without new names."""
    every, options = 1, dict[str, Any]()
    match config.activation_checkpointing:
        case ActivationCheckpointing.none:
            return
        case ActivationCheckpointing.full:
            pass
        case ActivationCheckpointing.every_n:
            every = config.activation_checkpointing_every
        case ActivationCheckpointing.selective:
            options = {"context_fn": selective_contexts}
            if config.activation_offload is not ActivationOffload.none:  # the offload moves what is saved
                options["respect_saved_tensors_hooks"] = True
        case _:
            raise ValueError(f"activation_checkpointing={config.activation_checkpointing} is not known")
    for block in blocks[every - 1 :: every]:
        if config.compile:  # compiled code writes buffers in the forward pass alone
            block.forward = recomputed(block.forward, **options)
        else:
            block.forward = _Recomputed(block, **options)


def recomputed(forward: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return a forward pass that is computed again. The compiler skips a `partial` of `checkpoint`."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    return run


class _Recomputed:
    """The forward pass of a block, whose buffers, numbers and random generators change once, as without checkpointing.

    The recomputation gets them as they were before the forward pass: it computes the same, and what it writes is
    dropped. `checkpoint` does so for PyTorch's own generators.
    """

    def __init__(self, block: nn.Module, **options: Any) -> None:
        self._block, self._forward, self._options = block, block.forward, options
        self._changing: dict[Key, bool] = {}  # whether a pass changes a buffer; set after the first pass
        self._drawing: list[Access] = []  # generators of the block from which one of the first passes drew
        self._looks = 2  # in so many passes they are searched: the first may make them

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        return checkpoint(self._once(), *args, use_reentrant=False, **self._options, **kwargs)

    def _once(self) -> Callable[..., Any]:
        """Return the block's forward pass for one call. Every further run of it is a recomputation."""
        before: dict[Key, Any] | None = None
        drawn: list[tuple[Access, Any]] = []

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal before
            if before is None:
                numbers, buffers = self._numbers(), self._buffers()
                generators = self._find_generators((*args, *kwargs.values()))
                with without_modes():  # states are never fake tensors
                    states = [(each, each[0]()) for each in generators]
                outputs = self._forward(*args, **kwargs)
                before = {key: number for key, number in numbers.items() if _is_other(getattr(*key, _GONE), number)}
                before.update(self._changed(buffers))
                with without_modes():
                    drawn.extend((each, state) for each, state in states if in_bytes(each[0]()) != in_bytes(state))
                if self._looks:
                    self._looks -= 1
                    self._drawing += [each for each, _ in drawn if each not in (*PROCESS, *self._drawing)]
                return outputs
            now = {key: getattr(*key, _GONE) for key in before}
            with without_modes():
                later = [each[0]() for each, _ in drawn]
                for (_, put), state in drawn:
                    put(state)
            for (module, name), value in before.items():  # clones: a retained graph is recomputed again
                setattr(module, name, value.clone() if isinstance(value, Tensor) else value)
            try:
                return self._forward(*args, **kwargs)
            finally:
                for (module, name), value in now.items():
                    if value is _GONE:
                        delattr(module, name)
                    else:
                        setattr(module, name, value)
                with without_modes():
                    for ((_, put), _), state in zip(drawn, later, strict=True):
                        put(state)

        return run

    def _find_generators(self, given: Sequence[Any]) -> list[Access]:
        """Return the generators of the process, those that the block draws from, and those that it gets."""
        own = generators_of(self._block.modules()) if self._looks else self._drawing
        return [*PROCESS, *own, *(access(value) for value in given if has_state(value))]

    def _numbers(self) -> dict[Key, float]:
        modules = self._block.modules()
        return {(m, name): value for m in modules for name, value in vars(m).items() if isinstance(value, int | float)}

    def _buffers(self) -> list[tuple[Key, Tensor, int, Tensor | None]]:
        """Return where the buffers are, each itself, its version, and a copy of one that may be written."""
        return [
            (key, buffer, version_of(buffer), buffer.detach().clone() if self._changing.get(key, True) else None)
            for module in self._block.modules()
            for name, buffer in module.named_buffers(recurse=False)
            for key in [(module, name)]
        ]

    def _changed(self, buffers: list[tuple[Key, Tensor, int, Tensor | None]]) -> Iterator[tuple[Key, Tensor]]:
        """Yield the buffers that the forward pass has changed, as they were before."""
        for key, buffer, version, copy in buffers:
            module, name = key
            is_written = version_of(buffer) != version
            if is_written and copy is None:
                raise ModelError(
                    f"activation checkpointing: a {type(module).__name__} writes its buffer {name} in place, but not "
                    f"in its first pass, so what it held is lost; assign a new tensor (self.{name} = ...), write it in "
                    "each pass, or use activation_checkpointing=none."
                )
            # the kernels of normalisations count no version
            is_new = is_written or getattr(*key) is not buffer or hasattr(module, "track_running_stats")
            self._changing[key] = is_new or self._changing.get(key, False)
            if self._changing[key]:
                # copied here, too: under `selective` a recomputation may make no more copies than the forward pass
                yield key, buffer.detach().clone() if copy is None else copy


def _is_other(now: Any, number: float) -> bool:
    return type(now) is not type(number) or now != number


def check_no_unit_inside(blocks: Sequence[nn.Module], units: Sequence[nn.Module]) -> None:
    """Check that no recomputed block has a sharding unit inside: its gathering would count as an operator.

    Raises:
        ModelError: a block has one.
    """
    inside = {id(module) for block in blocks for module in block.modules() if module is not block}
    if any(id(unit) in inside for unit in units):
        raise ModelError(
            "activation_checkpointing=selective: a block has sharding units inside, so it cannot be recomputed; name "
            "only the outer blocks with model.block_classes=[...], or use activation_checkpointing=full."
        )


def selective_contexts() -> Any:
    """Return the contexts of a block's forward pass and of its recomputation.

    As in torchtitan, the outputs of expensive operators and of every second matrix product are saved. A layer with a
    bias is `addmm`, which torchtitan's models lack; here it is a matrix product.
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
