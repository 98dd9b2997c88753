"""A step that is followed holds what a step that trains holds, learns the same, and says where it failed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._tools import mem_tracker, mod_tracker

from fsdp_lab.training.distributed import DistributedContext
from fsdp_lab.training.loop import Watch
from fsdp_lab.training.memory import MemoryProfiler, record_step
from fsdp_lab.training.torch_private import Change, allocator_changes
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


class KeepsPairs(torch.optim.SGD):
    """An optimizer whose state is no dictionary, which PyTorch allows."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = (parameter.grad.clone(), 1)


class Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise KeyError("of the user's")


class WrongBackward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Wrong.apply(x)  # type: ignore[no-any-return]


def forgets_modules(patch: pytest.MonkeyPatch) -> None:
    """The tracker then lacks a module in its table, of weak references."""
    patch.setattr(mem_tracker.MemTracker, "_track_inputs_or_outputs", lambda self, _: self.memory_tracking.clear())


def loses_a_module(patch: pytest.MonkeyPatch) -> None:
    """The tracker then finds modules entered that it does not know."""
    patch.setattr(mod_tracker.ModTracker, "_get_append_fn", lambda *_: lambda *_: None)


def nothing(patch: pytest.MonkeyPatch) -> None:
    pass


@pytest.mark.parametrize(
    ("module", "optimizer", "breaks", "is_trackers"),
    [
        (nn.Linear(8, 8), KeepsPairs, nothing, True),
        (nn.Linear(8, 8), torch.optim.SGD, forgets_modules, True),
        (nn.Linear(8, 8), torch.optim.SGD, loses_a_module, True),
        (Full(), torch.optim.SGD, nothing, False),
        (nn.Linear(4, 4), torch.optim.SGD, nothing, False),  # of another shape
        (WrongBackward(), torch.optim.SGD, nothing, False),
    ],
)
def test_an_error_of_the_tracker_says_how_to_avoid_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: nn.Module,
    optimizer: type[torch.optim.Optimizer],
    breaks: Callable[[pytest.MonkeyPatch], None],
    is_trackers: bool,
) -> None:
    breaks(monkeypatch)
    model, x = nn.Sequential(nn.Linear(8, 8), module), torch.randn(4, 8)
    memory = MemoryProfiler(config("memory_profile=peaks"), "a model", DistributedContext(0, 0, 1, CPU), tmp_path)
    checks: Any = SimpleNamespace(step=lambda number: nullcontext(False))
    watch = Watch(SimpleNamespace(), memory, SimpleNamespace(), checks, lambda step: None)  # type: ignore[arg-type]
    state: Any = SimpleNamespace(step=4, model=model, optimizer=optimizer(model.parameters(), lr=0.1))

    def step() -> None:
        with watch.step(state, [x]):
            model(x).sum().backward()
            state.optimizer.step()

    with pytest.raises(Exception) as caught:
        step()
    notes = caught.value.__notes__
    assert notes[0] == "step 5"
    assert any("memory_profile=off" in note for note in notes) == is_trackers, caught.value
