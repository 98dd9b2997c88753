"""A constructor that is run without values and then for them gives what one plain call of it gives."""

from __future__ import annotations

import random
from copy import deepcopy

import numpy as np
import pytest
import torch
from torch import nn

from fsdp_lab.workloads.construct import Blueprint, ValuesNeeded


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.rand(width))


class Net(nn.Module):
    """Ties, buffers, what is replaced, what is drawn before it is registered, and a second look at all at the end."""

    def __init__(self, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, width)
        self.first = nn.Linear(width, 3 * width)
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 10, bias=False)
        self.head.weight = self.embedding.weight
        steps = [x.item() for x in torch.linspace(0, 1, depth)]
        self.register_buffer("angles", torch.outer(torch.arange(4.0), torch.tensor(steps)), persistent=False)
        self.lstm = nn.LSTM(2, 2)
        self.list = nn.ParameterList([torch.zeros(2), torch.ones(2)])
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        for name, parameter in self.named_parameters():
            if name.endswith("linear.weight"):
                nn.init.trunc_normal_(parameter, std=0.02 / depth)


class Copies(nn.Module):
    """As nn.TransformerEncoder makes them, with layers that are no group's."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.Linear(8, 8)
        self.layers = nn.ModuleList(deepcopy(layer) for _ in range(3))


def generators() -> list[object]:
    return [torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())]


@pytest.mark.parametrize(("build", "group_bytes"), [(Net, 2**30), (Copies, 64)])
def test_values_are_those_of_one_plain_call(build: type[nn.Module], group_bytes: int) -> None:
    """And nobody else's random numbers change."""
    before = generators()
    blueprint = Blueprint(build, seed=5, group_bytes=group_bytes)
    got = dict(blueprint.values())
    assert generators() == before
    torch.manual_seed(5)
    plain = build()
    expected = dict(plain.named_parameters())
    assert list(got) and got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    for name, parameter in blueprint.model.named_parameters():
        assert parameter.is_meta and parameter.requires_grad == expected[name].requires_grad
    assert all(map(torch.equal, blueprint.model.buffers(), plain.buffers()))


def test_in_groups_values_are_distributed_alike_and_never_repeat() -> None:
    """Each group draws from a seed of its own: with one for all, the first layers of two groups would be equal."""
    grouped = Blueprint(lambda: Net(width=64, depth=6), seed=5, group_bytes=64 * 64 * 4)
    assert len(grouped._groups()) > 6
    values, again = dict(grouped.values()), dict(grouped.values())
    assert all(torch.equal(values[name], again[name]) for name in values)
    layers = [values[f"blocks.{n}.linear.weight"] for n in range(6)]
    for n, layer in enumerate(layers):
        assert float(layer.std()) == pytest.approx(0.02 / 6, rel=0.1)
        assert not any(torch.equal(layer, other) for other in layers[:n])


class Copied(nn.Module):
    """A module whose buffer is a copy of its weights, as a momentum encoder's is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("before", self.layer.weight.detach().clone())


def test_a_constructor_that_needs_values_is_named_and_run_whole() -> None:
    """What reads a value at once is in tests/workloads/test_user.py."""
    with pytest.raises(ValuesNeeded, match=r"^Copied: .*the buffer before is computed from them"):
        Blueprint(Copied, seed=2)
    blueprint = Blueprint(Copied, seed=2, whole=True)
    torch.manual_seed(2)
    plain = Copied()
    expected, values = dict(plain.named_parameters()), dict(blueprint.values())
    assert values.keys() == expected.keys() and all(torch.equal(values[name], expected[name]) for name in values)
    assert torch.equal(blueprint.model.before, plain.before)
