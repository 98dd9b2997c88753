"""A constructor that is run without values and then for them gives what one plain call of it gives."""

from __future__ import annotations

import random
import weakref
from copy import deepcopy
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fsdp_lab.config.errors import UserError
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
        shared = nn.Parameter(torch.empty(width))
        self.a, self.b = shared, shared
        self.head = nn.Linear(width, 10, bias=False)
        self.head.weight = self.embedding.weight
        steps = [x.item() for x in torch.linspace(0, 1, depth)]
        self.register_buffer("angles", torch.outer(torch.arange(4.0), torch.tensor(steps)), persistent=False)
        self.register_buffer("noise", torch.randn(3))
        self.list = nn.ParameterList([torch.zeros(2), torch.ones(2)])
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        nn.init.normal_(shared)
        for name, parameter in self.named_parameters():
            if name.endswith("linear.weight"):
                nn.init.trunc_normal_(parameter, std=0.02 / depth)


def plain(seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return dict(Net().named_parameters())


def test_values_are_those_of_one_plain_call() -> None:
    got = dict(Blueprint(Net, seed=5).values())
    expected = plain(5)
    assert list(got) and got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert not torch.equal(got["first.weight"], plain(6)["first.weight"])


def test_the_model_has_no_values_and_all_else() -> None:
    blueprint = Blueprint(Net, seed=5)
    model, theirs = blueprint.model, Net()
    assert all(parameter.is_meta for parameter in model.parameters())
    assert {n: (p.shape, p.dtype, p.requires_grad) for n, p in model.named_parameters()} == {
        n: (p.shape, p.dtype, p.requires_grad) for n, p in theirs.named_parameters()
    }
    assert model.head.weight is model.embedding.weight and model.a is model.b
    assert torch.equal(model.angles, theirs.angles) and model.angles.dtype == torch.float32
    assert set(blueprint.names) == set(dict(theirs.named_parameters()))


def test_in_groups_the_values_are_others_of_the_same_distribution_and_never_repeat() -> None:
    """Each group draws from a seed of its own: with one for all, the first layers of two groups would be equal."""
    grouped = Blueprint(lambda: Net(width=64, depth=6), seed=5, group_bytes=64 * 64 * 4)
    assert len(grouped._groups()) > 6
    values = dict(grouped.values())
    again = dict(Blueprint(lambda: Net(width=64, depth=6), seed=5, group_bytes=64 * 64 * 4).values())
    assert values.keys() == again.keys() and all(torch.equal(values[name], again[name]) for name in values)
    layers = [values[f"blocks.{n}.linear.weight"] for n in range(6)]
    for n, layer in enumerate(layers):
        assert float(layer.std()) == pytest.approx(0.02 / 6, rel=0.1)
        assert not any(torch.equal(layer, other) for other in layers[:n])


def test_copies_of_a_module_have_its_values_in_a_model_of_any_size() -> None:
    """As nn.TransformerEncoder makes them, with layers that are no group's."""
    values = dict(Blueprint(Copies, seed=5, group_bytes=64).values())
    torch.manual_seed(5)
    assert all(torch.equal(values[name], value) for name, value in Copies().named_parameters())


class Copies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.Linear(8, 8)
        self.layers = nn.ModuleList(deepcopy(layer) for _ in range(3))


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = self.linear.weight.norm().item()


def test_a_constructor_that_reads_values_is_named_and_run_whole_on_request() -> None:
    with pytest.raises(ValuesNeeded, match=r"^Reads: .*meta"):
        Blueprint(lambda: nn.Sequential(nn.Linear(2, 2), Reads()), seed=0)
    blueprint = Blueprint(Reads, seed=0, whole=True)
    assert all(parameter.is_meta for parameter in blueprint.model.parameters())
    torch.manual_seed(0)
    expected = Reads()
    assert blueprint.model.norm == expected.norm
    assert torch.equal(dict(blueprint.values())["linear.weight"], expected.linear.weight)


class Recurrent(nn.Module):
    """nn.LSTM holds weak references to its weights, which then cannot change places with others."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4)
        if by == "reading":
            self.largest = self.lstm.weight_hh_l0.max().item()
        if by == "putting":
            self.lstm._parameters["weight_hh_l0"] = other = nn.Parameter(torch.ones(16, 4))
            self.watched = weakref.ref(other)


@pytest.mark.parametrize("by", ["nothing", "reading", "putting"])
def test_parameters_that_are_watched_are_a_reason_to_run_a_constructor_whole(by: str) -> None:
    if by != "nothing":
        with pytest.raises(ValuesNeeded, match=r"^(Recurrent|LSTM|Module): "):
            Blueprint(partial(Recurrent, by), seed=2)
    blueprint = Blueprint(partial(Recurrent, by), seed=2, whole=by != "nothing")
    assert all(parameter.is_meta for parameter in blueprint.model.parameters())
    torch.manual_seed(2)
    plain = dict(Recurrent(by).named_parameters())
    values = dict(blueprint.values())
    assert values.keys() == plain.keys() and all(torch.equal(values[name], plain[name]) for name in plain)


@pytest.mark.parametrize(
    ("lazy", "remedy"), [(nn.LazyLinear(3), "use Linear with that size"), (nn.LazyBatchNorm1d(affine=False), "BatchN")]
)
@pytest.mark.parametrize("whole", [False, True])
def test_a_module_without_a_size_is_named(lazy: nn.Module, remedy: str, whole: bool) -> None:
    with pytest.raises(UserError, match=rf"the model has a {type(lazy).__name__}, .*{remedy}"):
        Blueprint(lambda: nn.Sequential(nn.Linear(2, 2), type(lazy)(*([3] if remedy[0] == "u" else []))), 0, whole)


class Copied(nn.Module):
    """A module whose buffer is a copy of its weights, as a momentum encoder's is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("before", self.layer.weight.detach().clone())


def test_a_buffer_that_is_computed_from_parameters_has_their_values() -> None:
    with pytest.raises(ValuesNeeded, match="the buffer before is computed from them") as caught:
        Blueprint(Copied, seed=3)
    assert caught.value.module == "Copied"
    blueprint = Blueprint(Copied, seed=3, whole=True)
    assert torch.equal(blueprint.model.before, dict(blueprint.values())["layer.weight"])


def test_nobody_elses_random_numbers_change() -> None:
    states = [torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()]  # type: ignore[union-attr]
    list(Blueprint(Net, seed=5).values())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]  # type: ignore[union-attr]


def test_a_large_model_takes_no_memory() -> None:
    """40 GB of parameters, on any machine that runs these tests."""
    blueprint = Blueprint(lambda: nn.Sequential(*(nn.Linear(10_000, 10_000) for _ in range(100))), seed=0)
    assert sum(parameter.numel() for parameter in blueprint.model.parameters()) == 100 * (10_000**2 + 10_000)
