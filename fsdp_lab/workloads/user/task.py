"""Tasks with the user's loss, and the wrapper of any task around the user's code."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_lab.config.errors import ModelError
from fsdp_lab.config.target import import_callable, user_line
from fsdp_lab.config.workload import ModelConfig, TaskConfig
from fsdp_lab.workloads.base import Batch, Loss, Task, describe, part_of, plain_class, unwrapped
from fsdp_lab.workloads.user.data import Marked
from fsdp_lab.workloads.user.loss_form import LossForm
from fsdp_lab.workloads.user.units import num_items, num_tokens

# Words in PyTorch's RuntimeErrors about tensors that do not fit each other.
_DOES_NOT_FIT = re.compile(r"shape|size|\bdim|dtype|scalar type|[Ee]xpected|must match|out of range|channels")

LossFunction = Callable[[Any, Batch], Any]


def build_task(config: TaskConfig, model: ModelConfig) -> Task:
    """Return the task of `task=custom` or `task=model_loss`."""
    metrics = import_callable(config.metrics, "task.metrics") if config.metrics else None
    unit = config.unit or "samples"
    if config.loss is None:
        return UserLoss(model_loss, "task=model_loss: the model's output", metrics, unit)
    return UserLoss(import_callable(config.loss, "task.loss"), f"task.loss={config.loss}", metrics, unit)


def model_loss(model: nn.Module, batch: Batch) -> Any:
    """Return the loss that a model computes itself, as those of Hugging Face's transformers do.

    Args:
        model: called with the batch's items as keyword arguments.
        batch: a dictionary.

    Raises:
        ModelError: the batch is no dictionary of the model's arguments, or the output has no loss.
    """
    if not isinstance(batch, Mapping):
        raise ModelError(
            f"task=model_loss calls model(**batch), but the batch is a {type(batch).__name__}; let data.collate_fn "
            "return a dictionary of the model's arguments, or use task.loss=<package.function>."
        )
    outputs = model(**batch)
    loss = part_of(outputs, "loss")
    if loss is None:
        raise ModelError(
            f"task=model_loss: the model returns a {type(outputs).__name__} without a loss; put the labels into the "
            "batch, or use task.loss=<package.function>."
        )
    return loss


class OnlyCalled:
    """A model as a loss gets it. It can be called, and has plain values such as `model.config`.

    Args:
        model: sharded or not.
        user: the key whose function gets the model, for messages.
    """

    def __init__(self, model: nn.Module, user: str) -> None:
        self._model, self._user = model, user

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return a plain value of the model.

        Raises:
            ModelError: it is a submodule, a tensor or a method, which work only in some shardings.
        """
        value = getattr(unwrapped(self._model), name)
        if isinstance(value, nn.Module | Tensor) or callable(value):
            raise ModelError(
                f"{self._user} uses model.{name} outside model(...): DDP wraps the model, and FSDP gathers weights "
                "only in its forward; move it into forward."
            )
        return value


class UserLoss:
    """The user's loss: `(sum, count)`, or a mean over a batch's items. In a validation, their number is its weight.

    While gradients are recorded, only the loss is computed.

    Args:
        function: takes the model and a batch, and returns the loss.
        name: for messages.
        metrics: takes the model and a batch, and returns `{name: (sum, count)}`; None: only the loss.
        unit: `samples` or `tokens`.
    """

    def __init__(self, function: LossFunction, name: str, metrics: LossFunction | None, unit: str) -> None:
        self.function, self.name, self.named_metrics, self.unit = function, name, metrics, unit
        self._returned = LossForm(name)

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        """Return the loss; in validation a pair: the loss (None: it is among the metrics) and the user's metrics.

        Raises:
            ModelError: see `LossForm.check`; or the metrics are no named pairs, or neither the batch nor the loss has
                the tokens that are to be counted.
        """
        if torch.is_grad_enabled():
            loss = self._returned.check(self.function(self.given(model, self.name), batch))
            if self.unit == "tokens" and isinstance(loss, Tensor) and num_tokens(batch) is None:
                raise ModelError(
                    f"task.unit=tokens: a batch of {describe(batch)} has no input_ids, no labels of two dimensions and "
                    "no rows of whole numbers; name them so, let task.loss return (sum, count), or use "
                    "task.unit=samples."
                )
            return loss
        named = {}
        if self.named_metrics is not None:
            named = _sums_and_counts(self.named_metrics(self.given(model, "task.metrics"), batch))
        if "loss" in named:
            return None, named
        return self._returned.check(self.function(self.given(model, self.name), batch)), named

    def given(self, model: nn.Module, user: str) -> Any:
        """Return the model as the user's function gets it; `user`: the key that names the function."""
        return OnlyCalled(model, user)

    def loss(self, outputs: Any, batch: Batch) -> Loss:
        """Return the outputs: `forward` computed the loss."""
        return outputs  # type: ignore[no-any-return]

    def metrics(self, outputs: Any, batch: Marked) -> dict[str, tuple[Tensor, Tensor]]:
        """Return `name -> (sum, count)`; a mean that the user's metrics lack is weighted by the items of the batch."""
        loss, named = outputs
        if loss is None:
            return named  # type: ignore[no-any-return]
        return {"loss": loss if isinstance(loss, tuple) else (loss * batch.num_items, batch.num_items), **named}

    def units(self, batch: Batch) -> int | None:
        return num_tokens(batch) if self.unit == "tokens" else num_items(batch)


def _sums_and_counts(named: Any) -> dict[str, tuple[Tensor, Tensor]]:
    if isinstance(named, Mapping) and all(isinstance(v, tuple | list) and len(v) == 2 for v in named.values()):
        return {str(name): (total, count) for name, (total, count) in named.items()}
    raise ModelError("task.metrics must return {name: (sum, count)}: the sum over the batch, and its divisor.")


class AroundUser:
    """A task in a workload with a part of the user's: unwraps marked batches, and explains errors of user code.

    Args:
        counts: whether batches may differ in the number of labels that count.
    """

    def __init__(self, task: Task, counts: bool = True) -> None:
        self.task, self.unit = task, task.unit
        self._name = getattr(task, "name", "the task")
        self.num_labels = self._num_labels if counts and hasattr(task, "num_labels") else None
        self.compile_loss = getattr(task, "compile_loss", None)
        self.take_step = getattr(task, "take_step", None)

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        """Return the task's outputs for an unmarked batch.

        Raises:
            ModelError: the batch does not fit the model.
        """
        batch = unmarked(batch)
        try:
            return self.task.forward(model, batch)
        except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
            # memory, peers and fake tensors raise RuntimeErrors, too
            if isinstance(error, RuntimeError) and (
                type(error) is not RuntimeError or not _DOES_NOT_FIT.search(str(error))
            ):
                raise
            where = _where(error, model)
            what = f"the forward pass fails in {where}" if where else f"{self._name} fails{_at(error)}"
            if f"must be Tensor, not {OnlyCalled.__name__}" in str(error):  # a function of PyTorch's
                raise ModelError(
                    f"{self._name}{_at(error)} gets the model where it wants a tensor: task.loss is called with the "
                    "model and a batch, as in def loss(model, batch): x, y = batch; return cross_entropy(model(x), y)"
                ) from error
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            line = f" ({user_line(error)})" if where and user_line(error) else ""
            raise ModelError(f"{what} on a batch of {describe(batch)}: {reason}{line}") from error

    def loss(self, outputs: Any, batch: Batch) -> Loss:
        return self.task.loss(outputs, unmarked(batch))

    def metrics(self, outputs: Any, batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the task's metrics; zero sums and counts for a batch that replaces a batch of padding."""
        named = self.task.metrics(outputs, batch if isinstance(self.task, UserLoss) else unmarked(batch))
        if not isinstance(batch, Marked):
            return named
        return {name: (_if_real(batch, total), _if_real(batch, count)) for name, (total, count) in named.items()}

    def units(self, batch: Batch) -> int | None:
        return self.task.units(unmarked(batch))

    def _num_labels(self, batch: Batch) -> Tensor:
        """Return the number of labels that count; 0 if the batch does not fit the task: `forward` reports that."""
        with suppress(TypeError, LookupError, AttributeError):
            return self.task.num_labels(batch)  # type: ignore[attr-defined, no-any-return]
        return torch.tensor(0)


def unmarked(batch: Batch) -> Batch:
    return batch.batch if isinstance(batch, Marked) else batch


def _if_real(batch: Marked, value: Any) -> Tensor:
    value = torch.as_tensor(value, device=batch.num_items.device)
    return torch.where(batch.num_items > 0, value, torch.zeros_like(value))


def _at(error: BaseException) -> str:
    line = user_line(error)
    return f" at {line}" if line else ""


def _where(error: BaseException, model: nn.Module) -> str:
    """Return the name and class of the innermost module in whose forward pass an error was raised.

    "" if it was raised before or after the forward pass.
    """
    names = {id(module): name for name, module in model.named_modules()}
    nearest = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in names and frame.f_code.co_name == "forward":
            nearest = owner
    if nearest is None:
        return ""
    name = names[id(nearest)].removeprefix("module.")
    kind = plain_class(nearest).__name__
    return f"{name} ({kind})" if name and name != "module" else kind
