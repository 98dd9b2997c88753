"""A constructor is called once, as in a plain script, or gives a model without values that is alike in all else."""

from __future__ import annotations

import random
from copy import deepcopy

import numpy as np
import pytest
import torch
from torch import nn

from fsdp_lab.workloads.construct import TooLarge, construct, copy_on_meta, without_values


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.rand(width))


class Net(nn.Module):
    """Ties, buffers, what is replaced, copied, marked or held, and a second look at all at the end."""

    calls = 0

    def __init__(self, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        Net.calls += 1
        self.embedding = nn.Embedding(10, width)
        self.first = nn.Linear(width, 3 * width)
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.copies = nn.ModuleList(deepcopy(self.first) for _ in range(2))
        self.head = nn.Linear(width, 10, bias=False)
        self.head.weight = self.embedding.weight
        marked = nn.Parameter(torch.rand(3))
        marked.no_decay = True
        self.marked, self.held = marked, [marked]
        steps = [x.item() for x in torch.linspace(0, 1, depth)]
        self.register_buffer("angles", torch.outer(torch.arange(4.0), torch.tensor(steps)), persistent=False)
        self.lstm = nn.LSTM(2, 2)
        self.list = nn.ParameterList([torch.zeros(2), torch.ones(2)])
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        for name, parameter in self.named_parameters():
            if name.endswith("linear.weight"):
                nn.init.trunc_normal_(parameter, std=0.02 / depth)


class Copied(nn.Module):
    """A module whose buffer is a copy of its weights, as a momentum encoder's is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("before", self.layer.weight.detach().clone())


class Reads(Copied):
    def __init__(self) -> None:
        super().__init__()
        self.scale = float(self.layer.weight.norm())


def generators() -> list[object]:
    return [torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())]


def test_the_constructor_is_called_once_as_in_a_script() -> None:
    """And nobody else's random numbers change."""
    before, calls = generators(), Net.calls
    with torch.device("meta"):  # whatever the caller makes tensors on
        made = construct(Net, seed=5)
    assert generators() == before and Net.calls == calls + 1
    torch.manual_seed(5)
    plain = Net()
    expected = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}
    got = {**dict(made.named_parameters()), **dict(made.named_buffers())}
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.parametrize("kind", [Net, Copied, Reads])
def test_without_values_all_but_the_values_is_alike(kind: type[nn.Module]) -> None:
    """One that reads values is called again, with them."""
    before = generators()
    made, plain = without_values(kind, seed=5), construct(kind, seed=5)
    assert generators() == before
    for model in (made, copy_on_meta(plain)):
        for (name, got), (expected_name, expected) in zip(
            model.named_parameters(), plain.named_parameters(), strict=True
        ):
            assert (name, got.shape, got.requires_grad) == (expected_name, expected.shape, expected.requires_grad)
            assert got.is_meta and isinstance(got, nn.Parameter) and vars(got) == vars(expected)
        assert all(map(torch.equal, model.buffers(), plain.buffers()))
        if kind is Net:
            assert model.head.weight is model.embedding.weight and model.held[0] is model.marked
    assert not any(parameter.is_meta for parameter in plain.parameters())


def test_what_a_forward_pass_computes_from_is_copied_without_values() -> None:
    """PyTorch refuses to copy the product of two parameters, which the old weight norm keeps."""
    layer = nn.Linear(3, 3)
    layer.product = layer.weight * layer.bias
    assert copy_on_meta(layer).product.is_meta


def test_parameters_over_the_limit_stop_the_constructor() -> None:
    size = sum(p.numel() * p.element_size() for p in nn.Linear(8, 8).parameters())
    assert construct(lambda: nn.Linear(8, 8), 0, most_bytes=size).weight.shape == (8, 8)

    def caught() -> nn.Module:
        try:
            return nn.Linear(8, 8)
        except Exception:  # noqa: BLE001 (as a user writes it)
            return nn.Identity()

    with pytest.raises(TooLarge):
        construct(caught, 0, most_bytes=size - 1)
    assert nn.Linear(8, 8).weight.shape == (8, 8), "nobody counts any more"
