"""The loss of a step: the mean over all labels of its global batch, however ranks and microbatches divide them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fsdp_lab.training.distributed import ParallelDims
from fsdp_lab.training.parallel.base import local, whole
from fsdp_lab.workloads.base import Batch, Loss, Task


class StepLoss:
    """Weighs the loss of each microbatch of a step, and adds them up. Every rank makes the same calls.

    Microbatches weigh the same, or by the labels in them that count:

    - A task may know the labels of a batch, by `num_labels`. Ranks add them up before the first forward pass.
    - A loss `(sum, count)` has them after the forward pass. Until the last one, sums are divided by a number that all
      ranks share: the labels in the first microbatch of all ranks, times the number of microbatches. With one
      microbatch that is the right number; with several, `finish` multiplies the gradients once by what is left.

    There are two ways because the first needs no multiplication of the gradients, and rounds them once less.

    Args:
        microbatches: of this rank, on any device.
        device: of the losses.

    Attributes:
        dtype: in which the task computed the last loss.
        num_labels: that counted in the step, over all ranks; None: before `finish`, or if the loss returned no count.
    """

    def __init__(self, task: Task, microbatches: list[Batch], device: torch.device, dims: ParallelDims) -> None:
        self.dtype = torch.float32
        self.num_labels: Tensor | None = None
        self._parts, self._device, self._dims = len(microbatches), device, dims
        self._total = torch.zeros((), device=device)
        self._weights = label_weights(task, microbatches, device, dims)
        self._counted: Tensor | None = None  # labels so far: of this rank; with one microbatch, of all ranks
        self._divisor: Tensor | None = None  # of sums, until `finish`

    def part(self, loss: Loss, i: int) -> Tensor:
        """Return the part of microbatch `i` in the loss of the step: the mean over ranks of the summed parts.

        Args:
            loss: the mean of the microbatch, or its sum and the number of its labels that count.
        """
        if isinstance(loss, tuple):
            return self._part_of_sum(whole(loss[0]), loss[1])
        loss = whole(loss)
        self.dtype = loss.dtype
        part = loss / self._parts if self._weights is None else loss * self._weights[i]
        self._total += part.detach()
        return part

    def _part_of_sum(self, total: Tensor, count: Tensor) -> Tensor:
        self.dtype = total.dtype
        count = whole(count).detach().to(self._device, torch.float32, copy=True, non_blocking=True)  # summed in place
        if self._counted is None or self._divisor is None:
            first = self._dims.sum(count if self._parts == 1 else count.clone())
            self._counted, self._divisor = count, _or_one(first) * self._parts
        else:
            self._counted += count
        self._total += total.detach()
        return total * (self._dims.dp_degree / self._divisor)

    def finish(self, model: nn.Module) -> Tensor:
        """Return this rank's part of the loss of the step; its mean over ranks is that loss.

        Args:
            model: its gradients, of all microbatches, become those of that loss, in place.
        """
        if self._counted is None or self._divisor is None:
            return self._total
        self.num_labels = counted = self._counted if self._parts == 1 else self._dims.sum(self._counted)
        labels = _or_one(counted)
        if self._parts > 1:
            scale_gradients(model, self._divisor / labels)
        return self._total * (self._dims.dp_degree / labels)


def _or_one(count: Tensor) -> Tensor:
    """Return a count, or 1 in place of 0, for a sum that is 0; it may be a sum of weights that are less than 1."""
    return count.where(count > 0, 1.0)


def label_weights(task: Task, microbatches: list[Batch], device: torch.device, dims: ParallelDims) -> Tensor | None:
    """Return a factor for the mean loss of each microbatch, `(microbatches,)` in float32; None if all weigh the same.

    With these factors the mean over ranks of the summed losses is the mean over all labels of the global batch. A
    microbatch with fewer labels weighs less. Every rank calls it. Counts are exact below 16 million; no sync point.
    """
    num_labels = getattr(task, "num_labels", None)
    if num_labels is None:
        return None
    mine = torch.stack([num_labels(batch) for batch in microbatches]).float().to(device, non_blocking=True)
    everyone = dims.sum(mine.sum())
    return mine * dims.dp_degree / everyone.clamp(min=1)


@torch.no_grad()
def scale_gradients(model: nn.Module, factor: Tensor) -> None:
    """Multiply all gradients by a scalar, in place, on whichever device and however divided they are."""
    on = {factor.device: factor}
    for parameter in model.parameters():
        if (gradient := parameter.grad) is not None:
            part = local(gradient)
            if part.device not in on:
                on[part.device] = factor.to(part.device)
            part.mul_(on[part.device])
