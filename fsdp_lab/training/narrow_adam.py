"""Adam and AdamW with their moments in bfloat16: half of the optimizer's memory.

PyTorch has this only in newer versions, for its fused kernel on CUDA. This works on any device with any kernel.
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

    Moments are rounded to the nearest value. With a `beta2` near 1 the second moment follows growing gradients but
    hardly shrinking ones, so steps are smaller than with float32.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take one step, and return the loss of `closure` if there is one."""
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
        """Load a state, and keep its moments in bfloat16. The base class casts them to the dtype of the parameters."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state.update({name: state[name].bfloat16() for name in _MOMENTS if name in state})


class NarrowAdamW(NarrowAdam):
    """The same with weight decay decoupled from the gradient."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, decoupled_weight_decay=True, **kwargs)
