"""What a user's loss may return: the mean of a batch, or its sum and the number of labels that count."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fsdp_lab.config.errors import ModelError
from fsdp_lab.workloads.base import Loss, describe, shape_of

_COUNT = "the number of labels that count, as (labels != -100).sum(), or the sum of their weights"


class LossForm:
    """The form of what a loss returns, which is the same for all batches.

    Args:
        name: of the loss, for messages.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._is_pair: bool | None = None
        self._counts_more = False  # a float count was above 1

    def check(self, loss: Any) -> Loss:
        """Return what the loss returned: a scalar tensor, or a tuple of two.

        Raises:
            ModelError: it is neither, has no gradient though these are recorded, or has another form than before.
        """
        is_pair = isinstance(loss, tuple | list) and len(loss) == 2
        if is_pair:
            loss = self._pair(*loss)
        else:
            self._scalar(
                loss, f"{self.name} is", "it must be the mean loss of the batch or (sum, count)", "loss.mean() is one"
            )
        if self._is_pair not in (None, is_pair):
            now, before = ("(sum, count)", "a mean") if is_pair else ("a mean", "(sum, count)")
            raise ModelError(
                f"{self.name} returned {before} for one batch and {now} for another; return (sum, count) for every "
                "batch, with a count of 0 where no label counts."
            )
        self._is_pair = is_pair
        return loss  # type: ignore[no-any-return]

    def _pair(self, total: Any, count: Any) -> tuple[Tensor, Tensor]:
        returned = f"{self.name} returns a pair, which must be (sum, count), but its"
        self._scalar(total, f"{returned} sum is", "it must be the summed loss", "loss.sum() is one")
        if not isinstance(count, Tensor) or count.ndim or count.is_complex():
            what = f"a tensor of {shape_of(count)}" if isinstance(count, Tensor) else f"a {type(count).__name__}"
            raise ModelError(
                f"{returned} count is {what}; it must be a scalar tensor, {_COUNT}: without .item(), and of a known "
                "number torch.tensor(number). A loss that returns a mean and anything else must return only the "
                "mean."
            )
        if count.requires_grad:
            raise ModelError(
                f"{returned} count depends on parameters, and no gradient goes through it; it must be {_COUNT}: "
                "count.detach() is one."
            )
        if count.is_floating_point() and not torch.is_grad_enabled() and not self._counts_more:
            self._check_fraction(float(count))  # in validation, where a sync point costs little
        return total, count

    def _check_fraction(self, count: float) -> None:
        """Check that a float count can be a count. A mean, such as an accuracy, would silently divide the loss."""
        if 0 < count < 1:
            raise ModelError(
                f"{self.name} returns a pair, which must be (sum, count), but its count is {count:.3g} for a whole "
                f"batch; it must be {_COUNT}. A loss that returns an accuracy beside its mean must return the mean "
                "alone; multiply sum and count of such weights by one number."
            )
        self._counts_more = count > 1

    def _scalar(self, loss: Any, what: str, rule: str, remedy: str) -> None:
        if not isinstance(loss, Tensor):
            kind, remedy = f"a {type(loss).__name__}", "return the tensor itself, without .item(), to keep its gradient"
        elif loss.ndim or not loss.is_floating_point():
            kind = f"a tensor of {shape_of(loss) if loss.is_floating_point() else describe(loss)}"
        elif torch.is_grad_enabled() and not loss.requires_grad:
            kind = "without a gradient"
            remedy = "compute it from what the model returned; of no labels, add 0 * logits.sum()"
        else:
            return
        raise ModelError(f"{what} {kind}; {rule}, as scalar tensors: {remedy}.")
