"""Fake tensors are as large as the real ones that they stand for."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from fsdp_lab.forecast.fake import HOST, ValuesOnRequest, fake_tensors, fake_world
from fsdp_lab.forecast.torch_private import FakeTensorMode
from fsdp_lab.training.recorder import StepRecorder
from fsdp_lab.training.torch_private import DEVICE, TorchDispatchMode

LOSSES = ("mse_loss", "smooth_l1_loss", "soft_margin_loss", "l1_loss", "huber_loss", "kl_div", "poisson_nll_loss",
          "binary_cross_entropy", "binary_cross_entropy_with_logits", "cross_entropy")  # fmt: skip


def num_bytes(name: str, reduction: str) -> int:
    inputs, targets = torch.rand(8, 5, requires_grad=True), torch.rand(8, 5)
    loss = getattr(F, name)(inputs, targets, reduction=reduction)
    loss.sum().backward()
    return loss.untyped_storage().nbytes()


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_fake_loss_has_the_storage_of_a_real_one(name: str, reduction: str) -> None:
    """Some means keep the memory of all elements: 160 bytes here, not 4."""
    real = num_bytes(name, reduction)
    with fake_tensors():
        assert num_bytes(name, reduction) == real


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fake_reduction_frees_its_tensor_without_a_garbage_collection(dtype: torch.dtype) -> None:
    """Else a forecast's peak depends on when Python collects: 4 bytes more than a trial's, now and then."""
    gc.disable()
    try:
        with fake_world(2, HOST), fake_tensors():
            reduced = torch.zeros(3, dtype=dtype)
            storage = weakref.ref(reduced.untyped_storage())
            work = dist.all_reduce(reduced, async_op=True)
            assert work is not None
            work.wait()
            assert work.get_future().value()[0].shape == (3,)
            del work, reduced
            assert storage() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("batch", [3, 5])
def test_a_fake_lstm_keeps_what_a_real_one_keeps(batch: int) -> None:
    """oneDNN's workspace among it, for which PyTorch's own fake layer has nothing."""

    def kept() -> int:
        sizes: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            sizes[id(tensor.untyped_storage())] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            nn.LSTM(16, 32, num_layers=2)(torch.rand(7, batch, 16))
        return sum(sizes.values())

    real = kept()
    with fake_tensors():
        assert kept() == real


class Hears(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operators: set[Any] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.operators.add(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "mode",
    [ValuesOnRequest, lambda: StepRecorder(nn.Module(), HOST)],
    ids=["values", "recorder"],
)
def test_where_a_fake_tensor_lies_is_answered_by_the_first_mode_that_is_asked(
    mode: Callable[[], TorchDispatchMode],
) -> None:
    """Autograd and modules in C++ ask it twice for each operator that computes, through every mode."""

    def heard(*modes: TorchDispatchMode) -> set[Any]:
        with FakeTensorMode(), Hears() as below:
            layer, inputs = nn.Linear(3, 4), torch.rand(2, 3)
            for each in modes:
                each.__enter__()
            layer(inputs).sum().backward()
            for each in modes:
                each.__exit__(None, None, None)
        return below.operators

    assert DEVICE in heard()
    assert heard() - heard(mode()) == {DEVICE}
