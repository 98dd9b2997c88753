"""Adam and AdamW with their moments in bfloat16: half of the optimizer's memory.

PyTorch has this for its fused kernel on CUDA alone, and only in newer versions; here any device and kernel will do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

_MOMENTS = ("exp_avg", "exp_avg_sq")


class NarrowAdam(torch.optim.Adam):
    """Adam that computes in the parameters' dtype, one parameter at a time, and keeps its moments in bfloat16.

    They are rounded to the nearest: with a `beta2` near 1 the second moment follows gradients that become larger, and
    hardly those that become smaller, so steps are smaller than with float32.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take one step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if (gradient := parameter.grad) is not None:
                    self._step_of(parameter, gradient, group)
        return loss

    def _step_of(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            device = parameter.device if group["fused"] else "cpu"
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            state |= {name: torch.zeros_like(parameter, dtype=torch.bfloat16) for name in _MOMENTS}
        mean, square = (state[name].to(parameter.dtype) for name in _MOMENTS)
        beta1, beta2 = group["betas"]
        adam(
            [parameter], [gradient], [mean], [square], [], [state["step"]],
            foreach=group["foreach"], fused=group["fused"], amsgrad=False, beta1=beta1, beta2=beta2, lr=group["lr"],
            weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
            decoupled_weight_decay=group["decoupled_weight_decay"],
        )  # fmt: skip
        for name, moment in zip(_MOMENTS, (mean, square), strict=True):
            state[name].copy_(moment)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state. The base class gives it the dtype of the parameters."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state.update({name: state[name].bfloat16() for name in _MOMENTS if name in state})


class NarrowAdamW(NarrowAdam):
    """The same with weight decay apart from the gradient."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, decoupled_weight_decay=True, **kwargs)
