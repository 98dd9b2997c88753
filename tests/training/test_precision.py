"""Precisions of some GPUs alone: TF32 of a trial, which ends with it, and linear layers in float8, by torchao."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdp_lab.config import UserError
from fsdp_lab.config.notes import cpu_notes, gpu_notes
from fsdp_lab.forecast.float8 import apply_fake_float8
from fsdp_lab.training.distributed import DistributedContext
from fsdp_lab.training.float8 import apply_float8
from fsdp_lab.training.train import train
from tests.ranks import Memo, config, run_ranks, train_all
from tests.training.reference import apart, train_unsharded

TRAINING = sys.modules["fsdp_lab.training.train"]  # `train` is the function, too
CPU = torch.device("cpu")
FLOAT8_TOLERANCE = 2e-2  # measured on a CPU that emulates it: 5e-3


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
    with pytest.raises(RuntimeError, match=expected or before):
        train(config(f"precision={precision}"), tmp_path, Memo())
    assert torch.get_float32_matmul_precision() == before == "highest"


def test_notes_say_where_tf32_would_help_and_where_it_does_not() -> None:
    noted = {
        (precision, has_tf32)
        for precision in ("fp32", "grad_bf16", "tf32", "bf16")
        for has_tf32 in (True, False)
        if list(gpu_notes(config(f"precision={precision}"), has_tf32))
    }
    assert noted == {("fp32", True), ("grad_bf16", True), ("tf32", False)}
    assert [bool([*cpu_notes(config(f"precision={precision}"))]) for precision in ("tf32", "fp32")] == [True, False]


class Sub(nn.Linear):
    """A linear layer with a forward pass of its own."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.whole, self.odd, self.sub = nn.Linear(32, 16), nn.Linear(16, 10), Sub(16, 16)


def net() -> nn.Module:
    return nn.ModuleDict({"blocks": nn.ModuleList(Block() for _ in range(2)), "head": nn.Linear(16, 16)})


def kept(layer: nn.Module, *shape: int) -> list[tuple[int, ...]]:
    """The shapes of what a layer keeps for its backward pass, apart from its weight."""
    shapes: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(tuple(t.shape)) or t, lambda t: t):
        layer(torch.ones(shape, requires_grad=True))
    return [shape for shape in shapes if len(shape) > 2]


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
        of_forecast = kept(forecast.blocks[0].whole, 2, 16, 32)
    assert of_forecast == kept(model.blocks[0].whole, 2, 16, 32) == [(2, 16, 32)]


@pytest.mark.ci
def test_where_nothing_can_be_float8_it_is_refused() -> None:
    pytest.importorskip("torchao", reason="make test-ci has it")
    with pytest.raises(UserError, match=r"precision=float8 needs a GPU .*a CPU; use precision=bf16_mixed"):
        apply_float8(net(), (Block,), CPU)
    with pytest.raises(UserError, match="precision=float8 has nothing to convert"):
        apply_float8(net(), (nn.LayerNorm,), CPU, emulate=True)


def losses_on_gpu(words: list[str]) -> list[float]:
    """On one rank with a GPU: the loss of each step."""
    torch.distributed.destroy_process_group()  # tests.ranks made one for CPUs
    ((losses, _),) = train_all([words])
    return losses


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("more", ["sharding=ddp", "sharding=per_block", "sharding=root compile=true"])
def test_a_gpu_learns_in_float8_what_float32_learns(more: str) -> None:
    pytest.importorskip("torchao", reason="make test-ci has it")
    words = ["optimizer=sgd", "optimizer.lr=0.1"]
    (losses,) = run_ranks(1, losses_on_gpu, [*words, "precision=float8", *more.split()])
    assert 1e-6 < apart(losses, train_unsharded(config(*words)).losses) <= FLOAT8_TOLERANCE
