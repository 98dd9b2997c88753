"""A step that is followed holds what a step that trains holds, learns the same, and says where it failed."""

from __future__ import annotations

from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_lab.training.allocator_profile import Change, allocator_changes
from fsdp_lab.training.distributed import DistributedContext
from fsdp_lab.training.memory import MemoryProfiler
from fsdp_lab.training.recorder import record_step
from tests.ranks import config

CPU = torch.device("cpu")
ROWS, WIDTH = 4096, 256
TENSOR = ROWS * WIDTH * 4  # bytes of an activation


class Residual(nn.Module):
    """Each activation is used twice, so that gradients are added up. In `shared` the first of the two is at that time
    also that of another tensor, whose own backward pass has still to come."""

    def __init__(self, shared: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.shared:
            others = self.second(x), self.third(x)
            return (2 * (h + others[0])).sum() + (3 * (h + others[1])).sum()
        return (2 * h).sum() + (3 * h).sum()


def followed(model: nn.Module, x: Tensor) -> int:
    """The most that a forward and a backward pass hold in addition, as followed."""
    with record_step(model, torch.optim.SGD(model.parameters()), [x], CPU) as recorder:
        model(x).backward()
    profile = recorder.finish()
    before, *during = (sum(sums.values()) for sums, _ in islice(profile.states(), profile.begun - 1, None))
    return max(during) - before


def reported(model: nn.Module, x: Tensor) -> int:
    """The same without a mode, by PyTorch's profiler."""
    changes: list[Change] = []
    with allocator_changes(changes):
        model(x).backward()
    held = most = 0
    for change in changes:
        held += change.num_bytes
        most = max(most, held)
    return most


def test_gradients_are_added_up_in_place_as_in_training() -> None:
    torch.manual_seed(0)
    x = torch.randn(ROWS, WIDTH)
    assert abs(followed(Residual(), x) - reported(Residual(), x)) < TENSOR // 8, "a third tensor for the sum"


@pytest.mark.parametrize("shared", [False, True])
def test_a_gradient_that_another_tensor_has_too_is_not_overwritten(shared: bool) -> None:
    torch.manual_seed(0)
    model, x = Residual(shared), torch.randn(ROWS, WIDTH)
    model(x).backward()
    plain = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    followed(model, x)
    learned = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert plain and all(torch.equal(a, b) for a, b in zip(plain, learned, strict=True))


def test_a_gradient_that_a_hook_keeps_is_not_overwritten() -> None:
    model, x, kept = nn.Linear(WIDTH, WIDTH), torch.ones(ROWS, WIDTH), list[Tensor]()
    with record_step(model, torch.optim.SGD(model.parameters()), [x], CPU):
        h = model(x)
        parts = [factor * h for factor in (2.0, 3.0)]
        for part in parts:
            part.grad_fn.register_hook(lambda grads, _: kept.append(grads[0]))
        (parts[0].sum() + parts[1].sum()).backward()
    assert sorted(each.unique().item() for each in kept) == [2.0, 3.0]


def test_a_sum_within_a_backward_pass_is_left_alone() -> None:
    a, b = (torch.ones(4, 8, requires_grad=True) for _ in range(2))
    with record_step(nn.Linear(1, 1), torch.optim.SGD([a]), [], CPU):
        torch.atan2(a[:, :1], b).sum().backward()  # adds up two shapes
    assert a.grad is not None and a.grad[:, 0].tolist() == [4.0] * 4


class Full(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.expand(2**40, *x.shape).clone()  # more than any address


def test_out_of_memory_names_the_module(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Full())
    profiler = MemoryProfiler(config(), "a model", DistributedContext(0, 0, 1, CPU), tmp_path)
    x = torch.randn(4, 8)
    with (
        pytest.raises(RuntimeError, match="allocate"),
        profiler.track(model, torch.optim.SGD(model.parameters()), [x]),
    ):
        model(x)
    assert profiler.failed_at == "forward of 1"
    assert (tmp_path / "memory_peaks_rank0.json").is_file(), "the last profile"


class Shared(nn.Module):
    """Two blocks with one rotary embedding, and a part that returns what another returns."""

    def __init__(self) -> None:
        super().__init__()
        rotary = nn.Sequential(nn.Sigmoid())
        self.blocks = nn.ModuleList([nn.ModuleDict({"proj": nn.Linear(8, 8), "rotary": rotary}) for _ in range(2)])
        self.ends = nn.Sequential(nn.Sequential(nn.Linear(8, 8)), nn.Dropout(0.0))
        for block in self.blocks:
            block.forward = partial(self.through, block)

    @staticmethod
    def through(block: Any, x: Tensor) -> Tensor:
        return block["rotary"](block["proj"](x))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.ends(x)


def test_a_change_is_of_the_innermost_module_as_the_one_that_uses_it_calls_it() -> None:
    model, x = Shared(), torch.ones(4, 8)
    with record_step(model, torch.optim.SGD(model.parameters()), [x], CPU) as recorder:
        model(x).sum().backward()
    made = [e for e in recorder.profile.events[recorder.profile.begun :] if e.num_bytes == 4 * 8 * 4]
    forward = ["blocks.0.proj", "blocks.0.rotary.0", "blocks.1.proj", "blocks.1.rotary.0", "ends.0.0"]
    assert [e.module for e in made if e.phase == "forward"] == forward
    assert [e.module for e in made if e.phase == "backward"] == ["ends.0.0", *reversed(forward[1:4])]
