"""Precisions of some GPUs alone: TF32 of a trial, which ends with it, and linear layers in float8, by torchao."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdp_lab.config import UserError
from fsdp_lab.forecast.float8 import apply_fake_float8
from fsdp_lab.training.distributed import DistributedContext
from fsdp_lab.training.float8 import apply_float8
from fsdp_lab.training.train import train
from tests.forecast.planted import kept
from tests.ranks import Memo, config

TRAINING = sys.modules["fsdp_lab.training.train"]  # `train` is the function, too
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("device", "precision", "expected"), [("cuda:0", "tf32", "high"), ("cuda:0", "fp32", None), ("cpu", "tf32", None)]
)
def test_a_trial_multiplies_in_tf32_only_if_it_says_so_on_a_gpu(
    device: str, precision: str, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And leaves the process as it was, though it fails."""

    def fail(*_: object) -> None:
        raise RuntimeError(torch.get_float32_matmul_precision())

    monkeypatch.setattr(TRAINING, "setup_distributed", lambda _: DistributedContext(0, 0, 1, torch.device(device)))
    monkeypatch.setattr(TRAINING, "start_clean", lambda _: None)
    monkeypatch.setattr(TRAINING, "_train", fail)
    before = torch.get_float32_matmul_precision()
    with pytest.raises(RuntimeError, match=f"^{expected or before}$"):
        train(config(f"precision={precision}"), tmp_path, Memo())
    assert torch.get_float32_matmul_precision() == before == "highest"


class Sub(nn.Linear):
    """A linear layer with a forward pass of its own."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.whole, self.odd, self.sub = nn.Linear(32, 16), nn.Linear(16, 10), Sub(16, 16)


def net() -> nn.Module:
    return nn.ModuleDict({"blocks": nn.ModuleList(Block() for _ in range(2)), "head": nn.Linear(16, 16)})


def shapes_kept(layer: nn.Module) -> list[tuple[int, ...]]:
    """Of what a layer keeps for its backward pass, apart from its weight."""
    tensors = kept(lambda: layer(torch.ones(2, 16, 32, requires_grad=True)))
    return [tuple(tensor.shape) for tensor in tensors if tensor.dim() > 2]


@pytest.mark.ci
def test_linear_layers_of_blocks_with_sizes_of_a_gpu_are_float8() -> None:
    """A forecast's layers keep what torchao's keep."""
    pytest.importorskip("torchao", reason="make test-ci has it")
    model, forecast = net(), net()
    before = dict(model.named_parameters())
    apply_float8(model, (Block,), CPU, emulate=True)
    kinds = {name: type(m).__name__ for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    of_block = {"whole": "Float8Linear", "odd": "Linear", "sub": "Sub"}
    expected = {f"blocks.{i}.{name}": kind for i in range(2) for name, kind in of_block.items()}
    assert kinds == {**expected, "head": "Linear"}
    after = dict(model.named_parameters())
    assert after.keys() == before.keys() and all(after[name] is before[name] for name in before)

    apply_fake_float8(forecast, (Block,), CPU)
    with FakeTensorMode(allow_non_fake_inputs=True):
        of_forecast = shapes_kept(forecast.blocks[0].whole)
    assert of_forecast == shapes_kept(model.blocks[0].whole) == [(2, 16, 32)]


@pytest.mark.ci
def test_rows_that_no_gpu_multiplies_in_float8_are_refused() -> None:
    """In training: a validation has no gradients to add up."""
    pytest.importorskip("torchao", reason="make test-ci has it")
    model = net()
    apply_float8(model, (Block,), CPU, emulate=True)
    model.blocks[0].whole(torch.ones(4, 8, 32)).sum().backward()
    with torch.no_grad():
        model.blocks[0].whole(torch.ones(3, 8, 32))
    with pytest.raises(UserError, match=r"precision=float8: a linear layer gets 24 rows .*multiples of 16 in float8"):
        model.blocks[0].whole(torch.ones(3, 8, 32))


@pytest.mark.ci
def test_where_nothing_can_be_float8_it_is_refused() -> None:
    pytest.importorskip("torchao", reason="make test-ci has it")
    with pytest.raises(UserError, match=r"precision=float8 needs a GPU .*a CPU; use precision=bf16_mixed"):
        apply_float8(net(), (Block,), CPU)
    with pytest.raises(UserError, match="precision=float8 has nothing to convert"):
        apply_float8(net(), (nn.LayerNorm,), CPU, emulate=True)
