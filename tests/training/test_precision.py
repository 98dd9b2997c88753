"""Precisions of some GPUs alone: TF32 of a trial, which ends with it, and linear layers in float8, by torchao."""

from __future__ import annotations

import sys
from collections.abc import Iterator
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
from tests.ranks import Memo, config, run_ranks
from tests.training.reference import apart, train_unsharded

TRAINING = sys.modules["fsdp_lab.training.train"]  # `train` is the function, too
CPU = torch.device("cpu")
FLOAT8_TOLERANCE = 2e-2  # measured on a CPU that emulates it: 5e-3


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    assert torch.get_float32_matmul_precision() == "highest"


def precision_of(device: str, words: str, patch: pytest.MonkeyPatch, fails: bool = False) -> str:
    """Return how a trial on a device would multiply float32 matrices."""
    seen = []

    def followed(*_: object) -> None:
        seen.append(torch.get_float32_matmul_precision())
        if fails:
            raise RuntimeError("planted")

    patch.setattr(TRAINING, "setup_distributed", lambda _: DistributedContext(0, 0, 1, torch.device(device)))
    patch.setattr(TRAINING, "start_clean", lambda _: None)
    patch.setattr(TRAINING, "_train", followed)
    train(config(*words.split()), Path("unused"), Memo())
    return seen[0]


def test_only_a_gpu_and_only_with_tf32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert precision_of("cuda:0", "precision=tf32", monkeypatch) == "high"
    assert precision_of("cuda:0", "precision=fp32", monkeypatch) == "highest"
    assert precision_of("cpu", "precision=tf32", monkeypatch) == "highest"


def test_a_failed_trial_leaves_the_process_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.set_float32_matmul_precision("medium")
    try:
        with pytest.raises(RuntimeError, match="planted"):
            precision_of("cuda:0", "precision=tf32", monkeypatch, fails=True)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    ("words", "has_tf32", "notes"),
    [("fp32", True, 1), ("grad_bf16", True, 1), ("fp32", False, 0), ("tf32", True, 0), ("tf32", False, 1),
     ("bf16", True, 0)],
)  # fmt: skip
def test_a_note_where_tf32_would_be_faster_and_where_it_does_nothing(words: str, has_tf32: bool, notes: int) -> None:
    settings = config(f"precision={words}")
    assert len(list(gpu_notes(settings, has_tf32))) == notes
    assert bool(list(cpu_notes(settings))) is settings.precision.tf32


class Sub(nn.Linear):
    """A linear layer with a forward pass of its own."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.whole, self.odd, self.sub = nn.Linear(32, 16), nn.Linear(16, 10), Sub(16, 16)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(16, 16)


@pytest.mark.ci
def test_linear_layers_of_blocks_with_sizes_of_a_gpu_are_float8() -> None:
    pytest.importorskip("torchao", reason="make test-ci has it")
    with torch.device("meta"):
        model = Net()
    before = dict(model.named_parameters())
    apply_float8(model, (Block,), CPU, emulate=True)
    kinds = {name: type(m).__name__ for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    of_block = {"whole": "Float8Linear", "odd": "Linear", "sub": "Sub"}
    expected = {f"blocks.{i}.{name}": kind for i in range(2) for name, kind in of_block.items()}
    assert kinds == {**expected, "head": "Linear"}
    after = dict(model.named_parameters())
    assert after.keys() == before.keys() and all(after[name] is before[name] for name in before)


@pytest.mark.ci
def test_where_nothing_can_be_float8_it_is_refused() -> None:
    pytest.importorskip("torchao", reason="make test-ci has it")
    with pytest.raises(UserError, match=r"precision=float8 needs a GPU .*a CPU; use precision=bf16_mixed"):
        apply_float8(Net(), (Block,), CPU)
    with pytest.raises(UserError, match="precision=float8 has nothing to convert"):
        apply_float8(Net(), (nn.LayerNorm,), CPU, emulate=True)


def kept(layer: nn.Module, *shape: int) -> list[tuple[int, ...]]:
    """The shapes of what a layer keeps for its backward pass, apart from its weight."""
    shapes: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(tuple(t.shape)) or t, lambda t: t):
        layer(torch.ones(shape, requires_grad=True))
    return [shape for shape in shapes if len(shape) > 2]


@pytest.mark.ci
def test_a_forecasts_float8_layer_keeps_what_torchaos_keeps() -> None:
    pytest.importorskip("torchao", reason="make test-ci has it")
    torchaos, ours = Net(), Net()
    apply_float8(torchaos, (Block,), CPU, emulate=True)
    apply_fake_float8(ours, (Block,), CPU)
    expected = kept(torchaos.blocks[0].whole, 2, 16, 32)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert kept(ours.blocks[0].whole, 2, 16, 32) == expected == [(2, 16, 32)]


def losses_on_gpu(words: list[str], folder: str) -> list[float]:
    """On one rank with a GPU: the loss of each step."""
    import torch.distributed as dist

    dist.destroy_process_group()  # tests.ranks made one for CPUs
    losses: list[float] = []
    train(config(*words), Path(folder), Memo(), losses.extend)
    return losses


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("more", [["sharding=ddp"], ["sharding=per_block"], ["sharding=root", "compile=true"]], ids=str)
def test_a_gpu_learns_in_float8_what_float32_learns(more: list[str], tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="make test-ci has it")
    words = ["optimizer=sgd", "optimizer.lr=0.1"]
    (losses,) = run_ranks(1, losses_on_gpu, [*words, "precision=float8", *more], str(tmp_path))
    plain = train_unsharded(config(*words)).losses
    assert 1e-6 < apart(losses, plain) <= FLOAT8_TOLERANCE
