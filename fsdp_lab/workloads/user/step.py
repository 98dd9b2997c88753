"""The user's own step, `task.step`: several losses, each of which one optimizer minimises."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_lab.config.errors import ModelError, UserError
from fsdp_lab.config.target import in_words
from fsdp_lab.workloads.base import Batch, Loss, Task, describe, original_name, unwrapped
from fsdp_lab.workloads.user.loss_form import LossForm
from fsdp_lab.workloads.user.task import AroundUser, OnlyCalled, UserLoss
from fsdp_lab.workloads.user.units import num_tokens

Descend = Callable[[str, Task], Tensor]  # takes a step of the optimizer of that name


class Part(OnlyCalled):
    """A part of the model as a step gets it. It can be called in a loss, and switched between train and eval mode.

    Args:
        name: of the part.
        in_loss: returns whether it may be called now.
    """

    def __init__(self, model: nn.Module, user: str, name: str, in_loss: Callable[[], bool]) -> None:
        super().__init__(model, user)
        self._name, self._in_loss = name, in_loss

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._in_loss():
            raise ModelError(
                f"{self._user} calls the part {self._name} outside of run.minimize; call it in a loss, under "
                "torch.no_grad() where it is not trained: only there it computes in the trial's precision."
            )
        return super().__call__(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return a plain value of the part; see `OnlyCalled`."""
        if name in ("parameters", "named_parameters", "requires_grad_", "zero_grad"):
            raise ModelError(
                f"{self._user} uses {self._name}.{name}: run.minimize drops all gradients of other optimizers, so no "
                "part has to be frozen or cleared in a step; leave it out."
            )
        return super().__getattr__(name)

    def train(self, mode: bool = True) -> Part:
        self._model.train(mode)
        return self

    def eval(self) -> Part:
        return self.train(False)


def parts_of_model(model: nn.Module) -> dict[str, nn.Module]:
    """Return the parts that a step trains, each a root of sharding: the children of the model, by name."""
    return {original_name(name): child for name, child in unwrapped(model).named_children()}


def call_loss(loss_of: Callable[[Batch], Any], batch: Batch) -> Any:
    """Compute a loss. It is the forward of a model in parts, so that DDP, around the whole, sees what the loss uses."""
    return loss_of(batch)


def in_parts(build: Callable[[], nn.Module]) -> nn.Module:
    """Return the model of a constructor, which computes a loss of its parts when it is called.

    Raises:
        ModelError: it has no parts, or one that cannot be called, or parameters in none or in two.
    """
    model: Any = build()
    parts, owners = parts_of_model(model), dict[int, str]()
    if not parts:
        raise ModelError(
            f"task.step: {type(model).__name__} has no children; its parts, as self.generator and self.discriminator, "
            "are those that the step gets."
        )
    for name, part in parts.items():
        if type(part).forward is nn.Module.forward:
            raise ModelError(
                f"task.step: the part {name} ({type(part).__name__}) has no forward; give it one, as a class or "
                "nn.Sequential: FSDP gathers the weights of a part when it is called."
            )
        for leaf, parameter in part.named_parameters():
            if (other := owners.setdefault(id(parameter), name)) != name:
                raise ModelError(
                    f"task.step: the parts {other} and {name} share the parameter {leaf}; make it a part of its own."
                )
    for name, parameter in model.named_parameters():
        if id(parameter) not in owners:
            raise ModelError(f"task.step: the parameter {name} is in no part of the model; move it into a child.")
    model.forward = call_loss
    return model  # type: ignore[no-any-return]


class Run:
    """The second argument of the user's step.

    Attributes:
        step: the number of the step, from 1.
    """

    def __init__(self, step: int, descend: Callable[[str, Callable[[Batch], Any]], Tensor]) -> None:
        self.step, self._descend = step, descend

    def minimize(self, name: str, loss_of: Callable[[Batch], Any]) -> Tensor:
        """Take a step of the optimizer `name`, and drop all other gradients.

        Args:
            loss_of: called with each microbatch; returns its mean loss, or `(sum, count)`.

        Returns:
            this rank's part of the loss, detached; the mean over ranks is the loss of the global batch.
        """
        return self._descend(name, loss_of)


class UserStep(UserLoss):
    """The user's step, with a loss and metrics of the parts for validation.

    Args:
        step: takes the parts by name and a `Run`; returns what is recorded of the step, by name.
        path: of the step, for messages.
        loss: of the parts, for validation.
    """

    def __init__(self, step: Callable[[Mapping[str, Any], Run], Any], path: str, loss: UserLoss) -> None:
        super().__init__(loss.function, loss.name, loss.named_metrics, loss.unit)
        self._step, self._path = step, f"task.step={path}"
        self._forms: dict[tuple[str, int], LossForm] = {}
        self._in_step = self._in_loss = False

    def given(self, model: nn.Module, user: str) -> Any:
        def may_be_called() -> bool:
            return self._in_loss or not self._in_step

        return {name: Part(part, user, name, may_be_called) for name, part in parts_of_model(model).items()}

    def take_step(self, model: nn.Module, number: int, descend: Descend) -> dict[str, Tensor]:
        """Call the user's step.

        Args:
            number: of the step, from 1.
            descend: takes a step of one optimizer.

        Returns:
            what is recorded of the step: scalars by name.

        Raises:
            UserError: the step fails, minimises nothing, or returns something else.
        """
        minimised = list[str]()

        def minimise(name: str, loss_of: Callable[[Batch], Any]) -> Tensor:
            called = f"{self._path}: run.minimize({name!r}, ...)"
            if self._in_loss or not torch.is_grad_enabled():
                where = "inside of a loss" if self._in_loss else "under torch.no_grad()"
                raise ModelError(f"{called} is called {where}; call it in the step itself, with gradients.")
            minimised.append(name)
            # of an optimizer's first loss in a step, its second, ...
            form = self._forms.setdefault((name, minimised.count(name)), LossForm(f"the loss of {called}"))
            self._in_loss = True
            try:
                return descend(name, AroundUser(_Minimised(loss_of, form, self.unit), counts=False))
            finally:
                self._in_loss = False

        self._in_step = True
        try:
            returned = self._step(self.given(model, self._path), Run(number, minimise))
        except (TypeError, LookupError, AttributeError, NameError) as error:
            raise UserError(f"{self._path} fails: {in_words(error)}") from error
        finally:
            self._in_step = False
        if not minimised:
            raise UserError(f"{self._path} trains nothing: it must call run.minimize(name, loss_of).")
        return self._figures({} if returned is None else returned)

    def _figures(self, returned: Any) -> dict[str, Tensor]:
        scalars = isinstance(returned, Mapping) and all(
            isinstance(value, Tensor) and not value.ndim for value in returned.values()
        )
        if not scalars or (taken := sorted({"loss", "lr", "grad_norm", "loss_scale", "skipped_steps"} & {*returned})):
            what = f"the name {taken[0]}, which is taken" if scalars else "something else"
            raise UserError(
                f"{self._path} returns {what}; it must return {{name: scalar tensor}}, each recorded as train/<name>, "
                "or nothing."
            )
        return {str(name): value.detach() for name, value in returned.items()}


class _Minimised:
    """The task of one loss of a step."""

    def __init__(self, loss_of: Callable[[Batch], Any], form: LossForm, unit: str) -> None:
        self._loss_of, self._form, self.name, self.unit = loss_of, form, form.name, unit

    def forward(self, model: nn.Module, batch: Batch) -> Loss:
        if self.unit == "tokens" and num_tokens(batch) is None:
            raise ModelError(
                f"task.unit=tokens: a batch of {describe(batch)} has no tokens that are known without the loss; name "
                "them input_ids, or use task.unit=samples."
            )
        return self._form.check(model(self._loss_of, batch))

    def loss(self, outputs: Loss, batch: Batch) -> Loss:
        return outputs

    def metrics(self, outputs: Any, batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
        raise NotImplementedError("a loss of a step is not validated")

    def units(self, batch: Batch) -> int | None:
        return None
