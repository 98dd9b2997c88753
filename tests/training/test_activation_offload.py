"""What blocks save waits on the host: what is moved, once, comes back as it was, and changes no bit of a loss."""

from __future__ import annotations

from itertools import product
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from fsdp_lab.config import CombinationError
from fsdp_lab.config.rules import check_trial
from fsdp_lab.training.blocks import apply_to_blocks
from tests.operators import Operators
from tests.parity import VIT, WORKLOADS
from tests.ranks import config, run_ranks, train_all
from tests.training.saves import followed

SHARDINGS = (
    "sharding=ddp",
    "sharding=root",
    "sharding=per_block",
    "sharding=per_layer",
    "sharding=per_block sharding.api=fsdp1",
)
CASES = [
    f"{sharding} precision={precision} activation_checkpointing={checkpointing}"
    for sharding, precision, checkpointing in product(SHARDINGS, ("fp32", "bf16_mixed"), ("none", "full"))
]


def test_no_bit_of_a_loss_changes() -> None:
    """Also of the validation, whose forward pass saves nothing."""
    base = [*WORKLOADS["mlp"].words, *VIT, "reshard_after_forward=always", "memory_profile=off"]
    words = [[*base, *case.split(), f"activation_offload={where}"] for case in CASES for where in ("none", "cpu")]
    for trained in run_ranks(2, train_all, words):
        figures = [(losses, [epoch["val/loss"] for epoch in epochs]) for losses, epochs in trained]
        kept, moved = figures[::2], figures[1::2]
        assert [case for case, a, b in zip(CASES, kept, moved, strict=True) if a != b] == []
        assert len({str(each) for each in kept}) == 2, "each precision computes otherwise"


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_each_memory_is_moved_once_and_comes_back_as_it_was(checkpointing: str) -> None:
    kept, nothing = followed("none", checkpointing)
    moved, copies = followed("cpu", checkpointing)
    assert all(torch.equal(a, b) for a, b in zip(kept, moved, strict=True))
    assert nothing == []
    whole = 64 * 32 * 4
    if checkpointing == "full":
        assert copies == [whole], "the input"
        return
    assert copies.count(3 * whole) == 1, "one projection, of which q, k and v are views"
    assert copies.count(whole // 4) == 1, "a mask of bytes"
    assert set(copies) == {3 * whole, whole // 4, whole, 64 * 4 * 4}, "the last: the sums of attention"


def test_views_come_back_together() -> None:
    """A product of a memory with itself, of which it saves two views."""

    class Squared(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            made = super().forward(x)
            return made[:, :20] * made[:, 20:]

    block, sizes = Squared(30, 40), list[int]()
    apply_to_blocks(block, (Squared,), [], config("activation_offload=cpu"))
    out = block(torch.randn(50, 30, requires_grad=True))
    with Operators(lambda name, args, _: name == "aten::copy_" and sizes.append(args[0].numel())):
        out.sum().backward()
    assert sizes == [50 * 40, 50 * 30], "the memory of both, and the input"


class Holder(nn.Linear):
    """It saves its weight, a buffer, a tensor that it holds, its input and two results."""

    def __init__(self) -> None:
        super().__init__(40, 50)
        self.register_buffer("scale", torch.rand(30, 50))
        self.held = torch.rand(30, 50)

    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x) * self.scale * self.held).sin() * self.weight.sum()


def test_weights_buffers_and_what_a_module_holds_stay() -> None:
    block, sizes = Holder(), list[int]()
    apply_to_blocks(block, (Holder,), [], config("activation_offload=cpu"))
    with Operators(lambda name, args, _: name == "aten::copy_" and sizes.append(args[0].numel())):
        block(torch.randn(30, 40, requires_grad=True))
        with torch.no_grad():
            block(torch.randn(30, 40))
    assert sizes == [30 * 40, 30 * 50, 30 * 50], "the input, and that and the result of the sine"


def test_what_selective_saves_stays_on_the_device_before_pytorch_2_15() -> None:
    trial = config("activation_offload=cpu", "activation_checkpointing=selective")
    with (
        mock.patch("fsdp_lab.config.axes.activation_offload.pytorch_version", return_value=(2, 14)),
        pytest.raises(CombinationError, match=r"before PyTorch 2\.15 what it saves stays on the device"),
    ):
        check_trial(trial, 2)
