"""Batches in any nesting: what training and forecasts do to them without looking inside."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree

from fsdp_lab.workloads.base import tensors_of, to_device


class Pair(NamedTuple):
    left: Tensor
    right: list[Tensor]


A, B, C = torch.zeros(1), torch.ones(2), torch.full((3,), 2.0)
BATCH = {"pair": Pair(A, [B]), "names": ("x", 3, None), "more": (C, {"again": A})}


def test_the_tensors_of_a_batch_come_in_pytorchs_order():
    expected = [leaf for leaf in _pytree.tree_leaves(BATCH) if isinstance(leaf, Tensor)]
    assert [id(tensor) for tensor in tensors_of(BATCH)] == [id(tensor) for tensor in expected]
    assert tensors_of([]) == []


def test_a_batch_keeps_its_nesting_on_another_device():
    moved = to_device(BATCH, torch.device("meta"))
    expected = _pytree.tree_map_only(Tensor, lambda tensor: tensor.to("meta"), BATCH)
    assert _pytree.tree_structure(moved) == _pytree.tree_structure(expected)
    assert all(tensor.is_meta for tensor in tensors_of(moved)) and not A.is_meta
    assert type(moved["pair"]) is Pair and moved["names"] == ("x", 3, None)
