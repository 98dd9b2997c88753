"""Ends a trial soon after its loss is not finite, without waiting for the device in every step."""

from __future__ import annotations

import math
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_lab.training.step_checks import StepChecks

_EVERY = 10  # steps between two checks; a check waits for the device
_SKIPPED = 20  # with a loss scaler, which skips such steps: as many in a row are a divergence


class DivergedError(RuntimeError):
    """The loss of a step, or of a validation, is NaN or infinite."""


class LossCheck:
    """Raises on every rank once a step's loss is not finite; with loss scaling once 20 in a row, or all, are not.

    Every ten steps the ranks exchange their last losses, and the mark of what each has done. Every rank calls each
    method at the same steps.

    Args:
        step: the step before the first that is checked.
        device: where losses are.
        scales: whether a loss scaler skips the steps whose loss is not finite.
        checks: has the mark, and explains what ranks have done differently.
    """

    def __init__(self, step: int, device: torch.device, scales: bool = False, checks: StepChecks | None = None) -> None:
        self._start = self._first = step + 1
        self._device, self._checks = device, checks
        self._most = _SKIPPED if scales else 1
        self._in_a_row, self._begun = 0, ""  # steps whose loss is not finite, and the first of them
        self._losses: list[Tensor] = []

    def add(self, loss: Tensor) -> None:
        """Check the losses so far, if it is time.

        Args:
            loss: of the next step, this rank's part, on the device.
        """
        self._losses.append(loss)
        if len(self._losses) == _EVERY:
            self._look()

    def finish(self) -> None:
        """Check all losses so far, which are those of an epoch."""
        self._look()
        if self._in_a_row and self._in_a_row == self._first - self._start:
            self._end()

    def _look(self) -> None:
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
            if ranks and not self._in_a_row:
                more = f" and {len(ranks) - 1} more" if ranks[1:] else ""
                self._begun = f"the loss of step {number} is {losses[ranks[0]]} on rank {ranks[0]}{more}"
            self._in_a_row = self._in_a_row + 1 if ranks else 0
            if self._in_a_row == self._most:
                self._end()
        self._first, self._losses = self._first + len(self._losses), []

    def _end(self) -> NoReturn:
        more = f", and no loss of the next {self._in_a_row - 1} steps is finite" if self._in_a_row > 1 else ""
        raise DivergedError(self._begun + more)
