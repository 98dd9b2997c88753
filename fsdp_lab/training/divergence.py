"""Ends a trial soon after its loss is not finite, without waiting for the device in every step."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_lab.training.step_checks import StepChecks

_EVERY = 10  # steps between two looks, each of which waits for the device


class DivergedError(RuntimeError):
    """The loss of a step, or of a validation, is NaN or infinite."""


class LossCheck:
    """Raises on every rank once a step's loss is not finite.

    Every ten steps the ranks exchange their losses since, with the mark of what each has done. Every rank calls each
    method at the same steps.

    Args:
        step: the last step before the first one that is checked.
        device: where losses are.
        checks: has the mark, and explains what ranks have done differently.
    """

    def __init__(self, step: int, device: torch.device, checks: StepChecks | None = None) -> None:
        self._first, self._device, self._checks = step + 1, device, checks
        self._losses: list[Tensor] = []

    def add(self, loss: Tensor) -> None:
        """Check the losses so far, if it is time.

        Args:
            loss: of the next step, this rank's part, on the device.
        """
        self._losses.append(loss)
        if len(self._losses) == _EVERY:
            self.finish()

    def finish(self) -> None:
        """Check all losses so far."""
        if not self._losses:
            return
        mark = torch.full((), float(self._checks.mark if self._checks else 0), device=self._device)  # exact: 24 bits
        mine = torch.stack([*(loss.float() for loss in self._losses), mark])
        everyone = torch.empty(dist.get_world_size() * len(mine), device=self._device)
        dist.all_gather_into_tensor(everyone, mine)
        *by_step, marks = everyone.view(-1, len(mine)).T.tolist()
        if self._checks is not None and len(set(marks)) > 1:
            self._checks.explain()
        for number, losses in enumerate(by_step, self._first):
            ranks = [rank for rank, loss in enumerate(losses) if not math.isfinite(loss)]
            if ranks:
                more = f" and {len(ranks) - 1} more" if ranks[1:] else ""
                raise DivergedError(f"the loss of step {number} is {losses[ranks[0]]} on rank {ranks[0]}{more}")
        self._first, self._losses = self._first + len(self._losses), []
