"""Ends a trial soon after its loss is not finite, without waiting for the device in every step."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_lab.training.step_checks import StepChecks

_EVERY = 10  # steps between two looks; a loss is seen at the second look after it, so within 20 steps


class DivergedError(RuntimeError):
    """The loss of a step, or of a validation, is NaN or infinite."""


class LossCheck:
    """Raises on every rank once a step's loss is not finite.

    Every ten steps the ranks exchange their losses since, and look at those that they exchanged the time before. These
    have reached the host by then, so no rank waits for its device. Every rank calls each method at the same steps. The
    mark of what a rank has done goes with them.

    Args:
        step: the last step before the first one that is checked.
        device: where losses are.
        checks: has the mark, and explains what ranks have done differently.
    """

    def __init__(self, step: int, device: torch.device, checks: StepChecks | None = None) -> None:
        self._first, self._device, self._checks = step + 1, device, checks
        self._losses: list[Tensor] = []
        self._sent: _Exchanged | None = None

    def add(self, loss: Tensor) -> None:
        """Check the losses exchanged before, if it is time.

        Args:
            loss: of the next step, this rank's part, on the device.
        """
        self._losses.append(loss)
        if len(self._losses) == _EVERY:
            self._exchange()

    def finish(self) -> None:
        """Check all losses so far."""
        if self._losses:
            self._exchange()
        if self._sent is not None:
            self._sent.check()

    def _exchange(self) -> None:
        before, self._sent = self._sent, _Exchanged(self._first, self._losses, self._device, self._checks)
        self._first, self._losses = self._first + len(self._losses), []
        if before is not None:
            before.check()


class _Exchanged:
    """The losses of some steps on all ranks, on their way to the host."""

    def __init__(self, first: int, losses: list[Tensor], device: torch.device, checks: StepChecks | None) -> None:
        mark = torch.full((), float(checks.mark if checks else 0), device=device)  # exact: it has 24 bits
        mine = torch.stack([*(loss.float() for loss in losses), mark])
        everyone = torch.empty(dist.get_world_size() * len(mine), device=device)
        dist.all_gather_into_tensor(everyone, mine)
        self._first, self._checks = first, checks
        self._by_rank = everyone.view(-1, len(mine)).to("cpu", non_blocking=True)  # into pinned memory
        self._arrived = torch.cuda.Event() if device.type == "cuda" else None
        if self._arrived is not None:
            self._arrived.record()

    def check(self) -> None:
        if self._arrived is not None:
            self._arrived.synchronize()
        *by_step, marks = self._by_rank.T.tolist()
        if self._checks is not None and len(set(marks)) > 1:
            self._checks.explain()
        for number, losses in enumerate(by_step, self._first):
            ranks = [rank for rank, loss in enumerate(losses) if not math.isfinite(loss)]
            if ranks:
                more = f" and {len(ranks) - 1} more" if ranks[1:] else ""
                raise DivergedError(f"the loss of step {number} is {losses[ranks[0]]} on rank {ranks[0]}{more}")
