"""Find a user's optimizer that silently computes with a rank's part of a tensor in place of the whole.

An operation on a `DTensor` is of the whole tensor. But a number that is read from one is of the rank's own part, and
FSDP1's parameters are plain parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_lab.config.errors import UserError
from fsdp_lab.config.target import user_line
from fsdp_lab.config.trial import TrialConfig
from fsdp_lab.memory.allocator_profile import not_reported
from fsdp_lab.memory.torch_private import ITEM, TorchDispatchMode, compiled_code_runs, without_modes
from fsdp_lab.training.distributed import gather
from fsdp_lab.training.parallel.base import MIXED, Parallel, at
from fsdp_lab.workloads.base import original_name, tensors_of, unwrapped

_NO_RULE = ("Sharding propagation failed", "sharding strategy")  # of DTensor
_ROUNDING = 1e-4  # of numbers that ranks compute alike


@contextmanager
def reads_refused(of: str) -> Iterator[Reads]:
    """Watch code of the user's optimizer inside.

    Args:
        of: which code it is, for the message.

    Raises:
        UserError: it reads a number of a rank's own part.
    """
    reads = Reads()
    try:
        with compiled_code_runs(), reads:
            yield reads
    except _OwnPart as error:
        line = user_line(error)
        raise UserError(
            f"{of} reads a number of a sharded tensor{f' ({line})' if line else ''} by .item(), float() or if, and "
            "each rank gets that of its own part. Read it from x.full_tensor(), or keep it a tensor: operations on one "
            "are of the whole. sharding=ddp has whole tensors only."
        ) from error


@contextmanager
def optimizer_explained(config: TrialConfig) -> Iterator[None]:
    """Explain an error that a step of the user's optimizer raises because of sharded parameters.

    Raises:
        UserError: PyTorch has no rule for an operation on a `DTensor`, or one meets a plain tensor.
    """
    try:
        yield
    except (AssertionError, TypeError) as error:
        if not of_users(config):
            raise
        raise UserError(
            f"the step of {of_users(config)} fails{at(error)}: {type(error).__name__} "
            f"{error}. fsdp_lab calls step() without arguments, once after the backward pass; use an optimizer that "
            "needs none."
        ) from error
    except (RuntimeError, NotImplementedError) as error:
        if not of_users(config) or not any(words in str(error) for words in (*_NO_RULE, MIXED)):
            raise
        raise UserError(
            f"sharding={config.sharding.granularity.name}: PyTorch cannot take the step of {of_users(config)} with "
            f"sharded parameters{at(error)}: "
            f"{str(error).strip().partition(chr(10))[0]} Let it work on x.full_tensor(), or use another optimizer, or "
            "sharding=ddp, which keeps parameters whole."
        ) from error


def of_users(config: TrialConfig) -> str:
    """Return the key that makes the user's own optimizers, with its value; "" if there are none."""
    if config.task.optimizers is not None:
        return f"task.optimizers={config.task.optimizers}"
    return f"optimizer._target_={config.optimizer.target}" if config.optimizer.target is not None else ""


class OwnStep:
    """Checks that all ranks take the same step."""

    def __init__(self, optimizers: Mapping[str, torch.optim.Optimizer], parallel: Parallel) -> None:
        self._optimizers, self._parallel = optimizers, parallel
        self._where = f"{parallel.sharding}: the step of {of_users(parallel.config)}"

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the step inside; every rank calls it.

        Raises:
            UserError: ranks have different numbers, or numbers of their own parts.
        """
        with reads_refused(self._where) as reads:
            yield
        self._check("" if reads.exchanges or self._parallel.flat_parts == 1 else reads.reduced)

    def _check(self, reduced: str) -> None:
        with without_modes(), not_reported():  # not part of a step that is recorded
            ranks = gather((reduced, dict(self._numbers())))
        for does in (does for does, _ in ranks if does):
            raise UserError(
                f"{self._where} reduces a tensor to one number ({does}), and each rank of sharding.api=fsdp1 has a "
                "flat part of it. Use sharding.api=fsdp2, which reduces whole tensors, or sharding=ddp."
            )
        first = ranks[0][1]
        for rank, (_, numbers) in enumerate(ranks):
            for name in (name for name in first if name in numbers):
                one, other = first[name], numbers[name]
                if one == one and other == other and abs(one - other) > _ROUNDING * max(abs(one), abs(other)):
                    raise UserError(
                        f"{self._where} has set {name} to {one:.6g} on rank 0 and {other:.6g} on rank {rank}, so ranks "
                        "take other steps. Compute it of the whole tensors (x.full_tensor()), or exchange it "
                        "(torch.distributed.all_reduce)."
                    )

    def _numbers(self) -> Iterator[tuple[str, float]]:
        named = unwrapped(self._parallel.model).named_parameters()
        names = {id(parameter): original_name(name) for name, parameter in named}
        made = self._optimizers.values()
        groups = [group for optimizer in made for group in optimizer.param_groups]
        holders = {f"param_groups[{i}]": group for i, group in enumerate(groups)}
        state = {names.get(id(key), key): value for optimizer in made for key, value in optimizer.state.items()}
        holders |= {f"state[{name}]": value for name, value in state.items() if isinstance(name, str)}
        for holder, values in holders.items():
            for key, value in values.items() if isinstance(values, dict) else ():
                if isinstance(value, int | float) or (type(value) is Tensor and value.ndim == 0):
                    yield f"{holder}[{key}]", float(value)


class _OwnPart(Exception):
    """A number was read of a rank's own part."""


class Reads(TorchDispatchMode):
    """Stops where a number is read from a divided tensor.

    Attributes:
        reduced: the first operator that made one number of a plain tensor; "": none did.
        exchanges: whether ranks have exchanged something.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reduced, self.exchanges = "", False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is ITEM and _is_divided(args[0]):
            raise _OwnPart
        result = func(*args, **(kwargs or {}))
        self.exchanges |= func.namespace in ("c10d", "_c10d_functional")
        is_number = any(tensor.ndim == 0 for tensor in tensors_of(result))
        if not self.reduced and is_number and any(t.numel() > 1 for t in tensors_of((args, kwargs or {}))):
            self.reduced = func.overloadpacket.__name__
        return result


def _is_divided(tensor: Tensor) -> bool:
    """Return whether ranks have other parts of a tensor."""
    if not isinstance(tensor, DTensor):
        return False
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return any(size > 1 and not placement.is_replicate() for size, placement in sizes)
