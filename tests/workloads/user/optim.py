"""Optimizers of a user's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class Lion(torch.optim.Optimizer):
    """Steps of one length, by the sign of a momentum (arXiv 2302.06675)."""

    def __init__(
        self, params: Iterable[Tensor], lr: float, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    momentum = state.setdefault("momentum", torch.zeros_like(parameter))
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(momentum.lerp(parameter.grad, 1 - beta1).sign_(), alpha=-group["lr"])
                    momentum.lerp_(parameter.grad, 1 - beta2)


class Late(torch.optim.Optimizer):
    """Pulls weights back to a slow average of them, which its second step makes, with a count that is a number."""

    def __init__(self, params: Iterable[Tensor], lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                state.setdefault("kept", [torch.zeros_like(parameter)])[0].add_(parameter.grad)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(parameter.grad, alpha=-group["lr"])
                if state["count"] >= 2:
                    slow = state.setdefault("slow", {"weight": parameter.clone(), "share": torch.tensor(0.5)})
                    slow["weight"].lerp_(parameter, 0.1)
                    parameter.lerp_(slow["weight"], slow["share"].item())


class Master(torch.optim.Optimizer):
    """Steps of float32 copies of narrower weights, by their momentum."""

    def __init__(self, params: Iterable[Tensor], lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    momentum = state.setdefault("momentum", torch.zeros_like(parameter, dtype=torch.float32))
                    master = state.setdefault("master", parameter.float().clone())
                    momentum.mul_(0.9).add_(parameter.grad.float())
                    master.add_(momentum, alpha=-group["lr"])
                    parameter.copy_(master)


class Compiled(torch.optim.Optimizer):
    """Compiles its step whole."""

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self._update = torch.compile(self._all, fullgraph=True, backend="eager")

    def _all(self, parameters: list[Tensor], gradients: list[Tensor], lr: float) -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.sub_(gradient * lr)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        self._update([p.detach() for p in group["params"]], [p.grad for p in group["params"]], group["lr"])


class Cautious(torch.optim.SGD):
    """Takes no step of a gradient that is too large."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if all(parameter.grad.abs().max() < 100 for parameter in self.param_groups[0]["params"]):
            super().step(closure)


class Langevin(torch.optim.SGD):
    """Adds noise, of the generator that every rank seeds by its own part of the batch."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(torch.randn_like(parameter), alpha=0.01)


class ScheduleFree(torch.optim.Optimizer):
    """SGD whose weights are an average in eval mode, and in train mode a point beside it (arXiv 2405.15682)."""

    def __init__(self, params: Iterable[Tensor], lr: float, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "steps": 0})
        self.in_training = False

    def train(self) -> None:
        self._move(True, lambda beta: 1 - beta)

    def eval(self) -> None:
        self._move(False, lambda beta: 1 - 1 / beta)

    @torch.no_grad()
    def _move(self, to_train: bool, share: Callable[[float], float]) -> None:
        for group in self.param_groups if to_train != self.in_training else ():
            for parameter in group["params"]:
                if "z" in self.state[parameter]:
                    parameter.lerp_(self.state[parameter]["z"], share(group["beta"]))
        self.in_training = to_train

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert self.in_training, "the optimizer is not in train mode"
        for group in self.param_groups:
            group["steps"] += 1
            share, lr, beta = 1 / group["steps"], group["lr"], group["beta"]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    z = self.state[parameter].setdefault("z", parameter.clone())
                    parameter.lerp_(z, share).add_(parameter.grad, alpha=lr * (beta * (1 - share) - 1))
                    z.sub_(parameter.grad, alpha=lr)


class Asks(torch.optim.SGD):
    """Takes no step without a closure, and may have more arguments."""

    def step(self, closure: Callable[[], float], scale: float = 1.0) -> None:  # type: ignore[override]
        super().step(closure)


class Normalized(torch.optim.SGD):
    """Divides each gradient by its norm, a tensor."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad * (group["lr"] / self.norm(parameter.grad)))

    def norm(self, gradient: Tensor) -> Any:
        return gradient.norm() + 1e-3


class ByNumber(Normalized):
    """Reads the norm."""

    def norm(self, gradient: Tensor) -> float:
        return gradient.norm().item() + 1e-3


class ByWholeNumber(Normalized):
    """Reads the norm of the whole gradient, however it is divided."""

    def norm(self, gradient: Tensor) -> float:
        norm = gradient.norm()
        return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item() + 1e-3


class Exchanges(Normalized):
    """Adds up the parts of the squared norms of all gradients itself, and keeps the sum for the next step."""

    def norm(self, gradient: Tensor) -> Any:
        return self.param_groups[0].get("norm", 1.0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        gradients = [p.grad for p in self.param_groups[0]["params"] if p.grad is not None]
        local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
        total = torch.stack([part.pow(2).sum() for part in local]).sum()
        if dist.is_initialized():
            dist.all_reduce(total)
        super().step(closure)
        self.param_groups[0]["norm"] = total.sqrt().item()


class KeepsOwn(torch.optim.SGD):
    """Its next step is shorter by a number of the rank's own part."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        group = self.param_groups[0]
        part = group["params"][0].grad
        group["lr"] /= 1 + (part.to_local() if isinstance(part, DTensor) else part).abs().max().item()


class ReadsFirst(torch.optim.SGD):
    """Its learning rates depend on first weights."""

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__([{"params": p, "lr": lr / (1 + float(p.detach().norm()))} for p in params], lr=lr)


class Picky(torch.optim.SGD):
    """Takes no vectors."""

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        params = list(params)
        if any(parameter.ndim != 2 for parameter in params):
            raise ValueError("Picky takes matrices only")
        super().__init__(params, lr=lr)


def no_optimizer(params: Iterable[Tensor], lr: float) -> nn.Module:
    return nn.Identity()
