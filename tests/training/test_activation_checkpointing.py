"""Which operators of a block run a second time in the backward pass, and what they find there."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_lab.config import UserError
from fsdp_lab.forecast.float8 import apply_fake_float8
from fsdp_lab.training.activation_checkpointing import checkpoint_blocks
from fsdp_lab.training.blocks import apply_to_blocks, check_blocks
from fsdp_lab.training.float8 import apply_float8
from fsdp_lab.training.parallel.units import sharding_units
from fsdp_lab.training.plain_state import seed_all
from tests.operators import Operators
from tests.ranks import config

LAYERS = 5


class Block(nn.Module):
    """Five linear layers with and without biases, attention between them, and a nonlinearity at the end."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=bias) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, *rest = (layer(x) for layer in self.layers)
        x = F.scaled_dot_product_attention(*(t.view(1, -1, 2, 8).transpose(1, 2) for t in (q, k, v)), is_causal=True)
        x = x.transpose(1, 2).reshape(-1, 16)
        for layer in rest:
            x = x + layer
        return F.gelu(x).exp()


def twice(mode: str, layers: str) -> dict[str, int]:
    """How often operators of the forward pass of one block run in its backward pass, beyond what runs there anyway."""
    counts = []
    for each in ("none", mode):
        torch.manual_seed(0)
        block = Block(bias=layers == "addmm")
        if layers == "torchao":
            pytest.importorskip("torchao", reason="make test-ci has it")
            apply_float8(block, (Block,), torch.device("cpu"), emulate=True)
        elif layers == "_scaled_mm":
            apply_fake_float8(block, (Block,), torch.device("cpu"))
        checkpoint_blocks([block], config(f"activation_checkpointing={each}"))
        out = block(torch.randn(3, 16, requires_grad=True)).sum()
        with Operators() as operators:
            out.backward()
        counts.append(Counter(name.removeprefix("aten::") for name in operators.names))
    return dict(counts[1] - counts[0])


@pytest.mark.parametrize(
    ("layers", "product"),
    [
        ("mm", "mm"),
        ("addmm", "addmm"),
        ("_scaled_mm", "_scaled_mm"),
        pytest.param("torchao", "mm", marks=pytest.mark.ci),
    ],
)
def test_selective_repeats_every_second_product_and_no_attention(layers: str, product: str) -> None:
    """torchtitan's rule: of five products the second and the fourth are computed again, in float8 too: a forecast's
    layers call `_scaled_mm`, torchao's `mm` with tensors of their own."""
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    full, selective = twice("full", layers), twice("selective", layers)
    assert full[product] == LAYERS and full[attention] == 1
    assert selective[product] == 2 and attention not in selective
    assert selective["gelu"] == full["gelu"] == 1


class Stateful(nn.Module):
    """A block that computes with what its forward pass changes: buffers, in place and by assignment, from the first
    pass or the third on, and numbers, one of which becomes a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.norm = nn.BatchNorm1d(8)
        self.weight = nn.Parameter(torch.ones(8))
        nn.utils.parametrizations.weight_norm(self, dim=None)
        self.calls, self.mean = 0, 0.0
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("last", torch.zeros(8))
        self.register_buffer("late", torch.zeros(8))
        self.register_buffer("total", torch.zeros(8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += 1
        self.total.add_(x.detach().mean(0))
        x = (x + self.total) * self.weight * (1 + self.late)
        self.last = 0.5 * self.last + x.detach().mean(0)
        if self.calls > 2:
            self.late = 0.5 * self.late + x.detach().mean(0)
        self.mean = x.square().mean(0)
        return torch.tanh(self.norm(self.linear(x)) * float(self.seen)) * self.calls + self.last


class Noise:
    """It holds a generator, and is called."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def __call__(self) -> float:
        return self.generator.random()


class Draws(nn.Module):
    """A block that draws numbers everywhere: of the process, of its own, of what it holds, and of what its first
    pass makes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(8, 8), 0
        self.own, self.lists = torch.Generator().manual_seed(0), {"a": [random.Random(0)]}
        self.noise, self.legacy = Noise(), np.random.RandomState(0)
        self.late, self.system = list[random.Random](), random.SystemRandom()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if not self.late:
            self.late.append(random.Random(0))
        if self.calls > 1:
            x = x + self.late[0].random()
        x = self.linear(x) * torch.rand(8) * torch.rand(8, generator=self.own)
        for number in (random.random(), np.random.rand(), self.noise(), self.legacy.rand()):
            x = torch.sin(x * (1 + number))
        return torch.sin(x + self.lists["a"][0].random())


@pytest.mark.parametrize("block", [Stateful, Draws])
@pytest.mark.parametrize(("mode", "times"), [("full", 2), ("selective", 1)])
def test_what_a_forward_pass_changes_changes_once(mode: str, times: int, block: type[nn.Module]) -> None:
    """Buffers, numbers and generators, over two microbatches a step, and gradients of the first step on. A graph that
    is kept is computed again from the same; PyTorch computes none again under `selective`."""

    def trained(mode: str) -> list[Tensor]:
        seed_all(0)
        model, found = nn.Sequential(block(), block()), list[Tensor]()
        checkpoint_blocks([*model], config(f"activation_checkpointing={mode}"))
        for _ in range(3):
            loss = sum(model(torch.randn(4, 8)).sum() for _ in range(2))
            for _ in range(times):
                loss.backward(retain_graph=True)
            found += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        drawn = torch.tensor([random.random(), np.random.rand()])
        return [*found, *model.buffers(), drawn, torch.tensor([block.calls for block in model])]

    plain, kept = trained("none"), trained(mode)
    assert plain[-1].tolist() == [6, 6]
    assert [(a - b).abs().max().item() for a, b in zip(plain, kept, strict=True)] == [0.0] * len(plain)


class Late(nn.Module):
    """A block that writes its buffer in place, but not in its first pass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.passes: list[None] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.passes:
            self.mean.add_(1)
        self.passes.append(None)
        return x.square() * (1 + self.mean)


def test_a_recomputation_from_lost_values_is_refused() -> None:
    checkpoint_blocks([block := Late()], config("activation_checkpointing=full"))
    block(torch.ones(4, 8))
    with pytest.raises(UserError, match=r"a Late writes its buffer mean in place.*self\.mean = \.\.\."):
        block(torch.ones(4, 8))


@pytest.mark.parametrize(("every", "recomputed"), [(1, [0, 1, 2, 3, 4, 5]), (2, [1, 3, 5]), (4, [3])])
def test_every_nth_block_is_recomputed(every: int, recomputed: list[int]) -> None:
    blocks = [Block() for _ in range(6)]
    trial = config("activation_checkpointing=every_n", f"activation_checkpointing_every={every}")
    checkpoint_blocks(blocks, trial)
    assert [i for i, block in enumerate(blocks) if "forward" in vars(block)] == recomputed


def test_blocks_that_cannot_be_recomputed_so_are_refused() -> None:
    """A unit inside of a block with `selective`; an n beyond the last block."""
    model = nn.Sequential(Block())
    model[0].layers[0] = Block()
    trial = config("sharding=per_block", "activation_checkpointing=selective")
    with pytest.raises(UserError, match=r"selective: a block has sharding units inside.*model\.block_classes"):
        apply_to_blocks(model, (Block,), sharding_units(model, (Block,), trial.sharding), trial)
    trial = config("sharding=root", "activation_checkpointing=every_n", "activation_checkpointing_every=4")
    with pytest.raises(UserError, match=r"activation_checkpointing_every=4 .* 3 blocks.*use at most 3"):
        check_blocks(nn.Sequential(Block(), Block(), Block()), (Block,), trial)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_recomputed_block_is_compiled_whole(mode: str) -> None:
    """As one graph: the compiler skips some callables, and then trains the block eagerly without a word."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    checkpoint_blocks([block := Block()], config("compile=true", f"activation_checkpointing={mode}"))
    block.compile(backend=backend)
    block(torch.randn(3, 16, requires_grad=True))
    assert len(graphs) == 1
