"""Tasks whose loss is the user's, and what any task needs around code of the user's."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fsdp_lab.config.errors import UserError
from fsdp_lab.config.target import import_callable, user_line
from fsdp_lab.config.workload import ModelGroup, TaskConfig
from fsdp_lab.workloads.base import Batch, Task, describe, plain_class, shape_of, tensors_of
from fsdp_lab.workloads.user.data import Marked

# What PyTorch's RuntimeErrors say of tensors that do not fit each other.
_DOES_NOT_FIT = re.compile(r"shape|size|\bdim|dtype|scalar type|[Ee]xpected|must match|out of range|channels")
_OF_WRAPPERS = re.compile(r"(^|\.)(_checkpoint_wrapped_module|_orig_mod)(?=\.|$)")

LossFunction = Callable[[Any, Batch], Any]


def build_task(config: TaskConfig, model: ModelGroup) -> Task:
    """Return the task of `task=custom` or `task=model_loss`."""
    metrics = import_callable(config.metrics, "task.metrics") if config.metrics else None
    unit = config.unit or "samples"
    if config.loss is None:
        return UserLoss(model_loss, "task=model_loss: the model's output", metrics, unit)
    return UserLoss(import_callable(config.loss, "task.loss"), f"task.loss={config.loss}", metrics, unit)


def model_loss(model: nn.Module, batch: Batch) -> Any:
    """Return the loss that a model computes itself, as those of Hugging Face's transformers do.

    Raises:
        UserError: the batch is no dictionary of the model's arguments, or the output has no loss.
    """
    if not isinstance(batch, dict):
        raise UserError(
            f"task=model_loss calls model(**batch), and the batch is a {type(batch).__name__}; let data.collate_fn "
            "return a dictionary of the model's arguments, or use task.loss=<package.function>."
        )
    outputs = model(**batch)
    loss = outputs.get("loss") if isinstance(outputs, dict) else getattr(outputs, "loss", None)
    if loss is None:
        raise UserError(
            f"task=model_loss: the model returns a {type(outputs).__name__} without a loss; put the labels into the "
            "batch, or use task.loss=<package.function>."
        )
    return loss


@dataclass(frozen=True)
class Validated:
    """What a batch of a validation gave. `named`: the sums and counts of the user's metrics."""

    loss: Any
    named: dict[str, tuple[Tensor, Tensor]]


class OnlyCalled:
    """A model as a loss gets it: to be called, and asked for plain values such as `model.config`."""

    def __init__(self, model: nn.Module, user: str) -> None:
        """
        Args:
            user: who gets it, for messages.
        """
        self._model, self._user = model, user

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """
        Raises:
            UserError: it is a part of the model, or a method: these work in some shardings only.
        """
        model = self._model.module if isinstance(self._model, DistributedDataParallel) else self._model
        value = getattr(model, name)
        if isinstance(value, nn.Module | Tensor) or callable(value):
            raise UserError(
                f"{self._user} uses model.{name} outside model(...): DDP wraps the model, and FSDP gathers weights "
                "only in its forward; move it into forward."
            )
        return value


class UserLoss:
    """A loss of the user's: a mean over the items of a batch, by whose number a validation weighs it.

    Where gradients are recorded, only the loss is computed.
    """

    def __init__(self, function: LossFunction, name: str, metrics: LossFunction | None, unit: str) -> None:
        self.function, self.name, self.named_metrics, self.unit = function, name, metrics, unit

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        if torch.is_grad_enabled():
            return self._scalar(self.function(OnlyCalled(model, self.name), batch))
        named = {}
        if self.named_metrics is not None:
            named = _sums_and_counts(self.named_metrics(OnlyCalled(model, "task.metrics"), batch))
        loss = None if "loss" in named else self._scalar(self.function(OnlyCalled(model, self.name), batch))
        return Validated(loss, named)

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        return outputs  # type: ignore[no-any-return]

    def metrics(self, outputs: Validated, batch: Marked) -> dict[str, tuple[Tensor, Tensor]]:
        if outputs.loss is None:
            return outputs.named
        return {"loss": (outputs.loss * batch.num_items, batch.num_items), **outputs.named}

    def units(self, batch: Batch) -> int:
        """Return the items of a batch; where tokens are counted, those of its first tensor of whole numbers. A batch
        that is one tensor has the labels in it, too, so that the first token of each row is none that is told."""
        if self.unit != "tokens":
            return num_items(batch)
        if isinstance(batch, Tensor) and batch.ndim > 1 and not batch.is_floating_point():
            return batch[:, 1:].numel()
        whole = (t for t in tensors_of(batch) if not t.is_floating_point() and t.ndim > 1)
        return next((tensor.numel() for tensor in whole), num_items(batch))

    def _scalar(self, loss: Any) -> Tensor:
        """
        Raises:
            UserError: what was returned is no scalar tensor that can be trained on.
        """
        if isinstance(loss, Tensor) and loss.ndim == 0 and loss.is_floating_point():
            return loss
        what, remedy = f"a {type(loss).__name__}", "return the tensor itself, without .item(), for it has the gradients"
        if isinstance(loss, Tensor):
            what, remedy = f"a tensor of {shape_of(loss)}", "loss.mean() is one"
            what = f"{what} {str(loss.dtype).removeprefix('torch.')}" if loss.ndim == 0 else what
        raise UserError(f"{self.name} is {what}; it is to be the mean loss of the batch, a scalar tensor: {remedy}.")


def _sums_and_counts(named: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """
    Raises:
        UserError: these are no named pairs.
    """
    if isinstance(named, dict) and all(isinstance(v, tuple | list) and len(v) == 2 for v in named.values()):
        return {str(name): (total, count) for name, (total, count) in named.items()}
    raise UserError(
        "task.metrics is to return {name: (sum, count)}: the sum over the batch, and what it is divided by."
    )


def num_items(batch: Batch) -> int:
    """Return the items of a batch: the first dimension of its first tensor that has one."""
    return next((len(tensor) for tensor in tensors_of(batch) if tensor.ndim), 1)


class AroundUser:
    """A task in a workload that has a part of the user's: takes the marks off batches, and says what does not fit."""

    def __init__(self, task: Task) -> None:
        self.task, self.unit = task, task.unit
        self._name = getattr(task, "name", "the task")
        self.num_labels: Callable[[Batch], Tensor] | None = getattr(task, "num_labels", None)

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        """
        Raises:
            UserError: the batch does not fit the model.
        """
        batch = _unmarked(batch)
        try:
            return self.task.forward(model, batch)
        except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
            # a RuntimeError is also what memory, peers and fake tensors raise
            if isinstance(error, RuntimeError) and (
                type(error) is not RuntimeError or not _DOES_NOT_FIT.search(str(error))
            ):
                raise
            where = _where(error, model)
            what = f"the forward pass fails in {where}" if where else f"{self._name} fails{_at(error)}"
            raise UserError(
                f"{what} on a batch of {describe(batch)}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
            ) from error

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        return self.task.loss(outputs, _unmarked(batch))

    def metrics(self, outputs: Any, batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
        named = self.task.metrics(outputs, batch if isinstance(self.task, UserLoss) else _unmarked(batch))
        if not isinstance(batch, Marked):
            return named
        return {name: (_if_real(batch, total), _if_real(batch, count)) for name, (total, count) in named.items()}

    def units(self, batch: Batch) -> int:
        return self.task.units(_unmarked(batch))


def _unmarked(batch: Batch) -> Batch:
    return batch.batch if isinstance(batch, Marked) else batch


def _if_real(batch: Marked, value: Any) -> Tensor:
    value = torch.as_tensor(value, device=batch.num_items.device)
    return torch.where(batch.num_items > 0, value, torch.zeros_like(value))


def _at(error: BaseException) -> str:
    line = user_line(error)
    return f" at {line}" if line else ""


def _where(error: BaseException, model: nn.Module) -> str:
    """Return the name and class of the innermost module in whose forward pass an error was raised; "" where it was
    raised before or after."""
    names = {id(module): name for name, module in model.named_modules()}
    found = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in names and frame.f_code.co_name == "forward":
            found = owner
    if found is None:
        return ""
    name = _OF_WRAPPERS.sub("", names[id(found)]).removeprefix("module.").strip(".")
    kind = plain_class(found).__name__
    return f"{name} ({kind})" if name and name != "module" else kind
