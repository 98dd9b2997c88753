"""Adam with moments in bfloat16, against the formulas written out."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from fsdp_lab.training.narrow_adam import NarrowAdam, NarrowAdamW

LR, BETA1, BETA2, EPS, DECAY = 0.05, 0.9, 0.95, 1e-8, 0.1
KERNELS = [{"fused": True}, {"foreach": True}, {"foreach": False}]


def rounded(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def by_hand(weight: Tensor, gradients: list[Tensor], decoupled: bool) -> Tensor:
    """Algorithm 1 of the paper with the moments rounded after each step; AdamW's with `decoupled`."""
    m, v = torch.zeros_like(weight), torch.zeros_like(weight)
    for t, gradient in enumerate(gradients, 1):
        g = gradient if decoupled else gradient + DECAY * weight
        weight = weight * (1 - LR * DECAY) if decoupled else weight
        m, v = BETA1 * m + (1 - BETA1) * g, BETA2 * v + (1 - BETA2) * g * g
        weight = weight - LR * (m / (1 - BETA1**t)) / ((v / (1 - BETA2**t)).sqrt() + EPS)
        m, v = rounded(m), rounded(v)
    return weight


def take(optimizer: NarrowAdam, parameter: Tensor, gradients: list[Tensor]) -> None:
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()


@pytest.fixture
def gradients() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(3, 5) * 2**-step for step in range(6)]


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@pytest.mark.parametrize("kind", [NarrowAdam, NarrowAdamW])
def test_a_step_is_adams_with_rounded_moments(
    kind: type[NarrowAdam], kernel: dict[str, bool], gradients: list[Tensor]
) -> None:
    weight = torch.randn(3, 5)
    parameter = torch.nn.Parameter(weight.clone())
    idle = torch.nn.Parameter(torch.ones(2))
    optimizer = kind([parameter, idle], lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY, **kernel)
    take(optimizer, parameter, gradients)
    expected = by_hand(weight, gradients, decoupled=kind is NarrowAdamW)
    torch.testing.assert_close(parameter.detach(), expected, rtol=0, atol=1e-5)
    wide = torch.nn.Parameter(weight.clone())
    take(torch.optim.Adam([wide], lr=LR, betas=(BETA1, BETA2), weight_decay=DECAY), wide, gradients)  # type: ignore[arg-type]
    assert (wide - expected).abs().max() > 1e-4, "the rounding shows"
    assert optimizer.state[parameter]["exp_avg_sq"].dtype is torch.bfloat16
    assert idle not in optimizer.state and torch.equal(idle.detach(), torch.ones(2))


def test_a_loaded_state_is_the_one_that_was_saved_to_the_bit(gradients: list[Tensor]) -> None:
    """The base class would make it float32, of twice the size."""
    parameter = torch.nn.Parameter(torch.randn(3, 5))
    optimizer = NarrowAdam([parameter], lr=LR, fused=True)
    take(optimizer, parameter, gradients[:3])
    again = torch.nn.Parameter(parameter.detach().clone())
    loaded = NarrowAdam([again], lr=LR, fused=True)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert {name: value.dtype for name, value in loaded.state[again].items()} == {
        "step": torch.float32, "exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16,
    }  # fmt: skip
    take(optimizer, parameter, gradients[3:])
    take(loaded, again, gradients[3:])
    assert torch.equal(parameter, again)
