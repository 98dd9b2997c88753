"""Linear layers in float8: which they are, what a machine without them says, and on a GPU the losses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdp_lab.config import UserError
from fsdp_lab.forecast.float8 import apply_fake_float8
from fsdp_lab.training.float8 import apply_float8
from tests.ranks import Memo, config, run_ranks
from tests.training.reference import apart, train_unsharded

CPU = torch.device("cpu")
FLOAT8_TOLERANCE = 2e-2  # measured on a CPU that emulates it: 5e-3


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


def test_a_worker_on_a_cpu_is_refused() -> None:
    with pytest.raises(UserError, match=r"precision=float8 needs a GPU .*a CPU; use precision=bf16_mixed"):
        apply_float8(Net(), (Block,), CPU)


def test_linear_layers_of_blocks_with_sizes_of_a_gpu_are_replaced() -> None:
    pytest.importorskip("torchao", reason="pip install -e '.[float8]'")
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


def test_blocks_without_such_a_layer_are_refused() -> None:
    pytest.importorskip("torchao", reason="pip install -e '.[float8]'")
    with pytest.raises(UserError, match="precision=float8 has nothing to convert"):
        apply_float8(Net(), (nn.LayerNorm,), CPU, emulate=True)


def kept(layer: nn.Module, *shape: int) -> list[tuple[int, ...]]:
    """The shapes of what a layer keeps for its backward pass, apart from its weight."""
    shapes: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(tuple(t.shape)) or t, lambda t: t):
        layer(torch.ones(shape, requires_grad=True))
    return [shape for shape in shapes if len(shape) > 2]


def test_a_forecasts_layer_keeps_what_torchaos_keeps() -> None:
    pytest.importorskip("torchao", reason="pip install -e '.[float8]'")
    torchaos, ours = Net(), Net()
    apply_float8(torchaos, (Block,), CPU, emulate=True)
    apply_fake_float8(ours, (Block,), CPU)
    expected = kept(torchaos.blocks[0].whole, 2, 16, 32)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert kept(ours.blocks[0].whole, 2, 16, 32) == expected == [(2, 16, 32)]


def losses_on_gpu(words: list[str], folder: str) -> list[float]:
    """On one rank with a GPU: the loss of each step."""
    import torch.distributed as dist

    from fsdp_lab.training.train import train

    dist.destroy_process_group()  # tests.ranks made one for CPUs
    losses: list[float] = []
    train(config(*words), Path(folder), Memo(), losses.extend)
    return losses


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("more", [["sharding=ddp"], ["sharding=per_block"], ["sharding=root", "compile=true"]], ids=str)
def test_a_gpu_learns_what_float32_learns(more: list[str], tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="pip install -e '.[float8]'")
    words = ["optimizer=sgd", "optimizer.lr=0.1"]
    (losses,) = run_ranks(1, losses_on_gpu, [*words, "precision=float8", *more], str(tmp_path))
    plain = train_unsharded(config(*words)).losses
    assert 1e-6 < apart(losses, plain) <= FLOAT8_TOLERANCE
