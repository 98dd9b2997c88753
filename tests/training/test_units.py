"""Which modules share a sharding unit, by what is gathered in a step."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn

from fsdp_lab.training.parallelize import in_groups, sharding_units
from tests.operators import Operators
from tests.ranks import config, run_ranks
from tests.training.test_torch_private import groups_made
from tests.training.units import names_of

NUM_BLOCKS = 4  # of vit_tiny


def gathers_of_steps(cases: list[list[str]]) -> list[list[int]]:
    """On one rank: of each case how many gathers three steps take, the second of which the tracker follows."""
    from fsdp_lab.training.build import build
    from fsdp_lab.training.distributed import build_parallel_dims, setup_distributed
    from fsdp_lab.training.loop import train_step
    from fsdp_lab.training.recorder import record_step
    from fsdp_lab.training.weights import init_weights
    from fsdp_lab.workloads.base import tensors_of
    from fsdp_lab.workloads.build import build_workload

    ranks, collected = setup_distributed(), []
    for words in cases:
        trial = config(*words)
        workload, dims = build_workload(trial.model, trial.data, trial.task), build_parallel_dims(trial.sharding, ranks)
        init = partial(init_weights, config=trial, device=ranks.device)
        state = build(workload.model, trial, dims, ranks.device, materialize=init)
        batches, counts = [tuple(map(torch.zeros_like, workload.data.example_batch(2)))], []
        for step in range(3):
            followed = record_step(state.model, state.optimizer, tensors_of(batches), ranks.device)
            with followed if step == 1 else nullcontext(), Operators() as operators:
                train_step(state, workload.task, batches, trial, ranks.device)
            counts.append(operators.names.count("c10d::_allgather_base_"))
        collected.append(counts)
    return collected


def test_blocks_that_share_a_unit_are_gathered_at_once_also_after_a_step_was_followed() -> None:
    """Each unit once, and with `always` again for the backward pass."""
    units = {1: NUM_BLOCKS, 3: 2}
    policies = {"never": 1, "always": 2}
    cases = [
        ["sharding=per_block", f"sharding.blocks_per_unit={size}", f"reshard_after_forward={policy}"]
        for policy, size in product(policies, units)
    ]
    result = run_ranks(2, gathers_of_steps, cases)
    expected = [
        [times * (count + 1)] * 3 for times, count in product(policies.values(), units.values())
    ]  # and the root
    assert result[0] == result[1] == expected


def test_all_units_reduce_in_one_group_of_their_own() -> None:
    apart = "sharding.separate_reduce_scatter_group=true"
    assert (groups_made(4), groups_made(4, apart)) == (0, 1)


class Block(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)


class Holder(Block):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(Block() for _ in range(3))


@pytest.mark.parametrize(
    ("size", "groups"),
    [
        (1, ["0.inner.0", "0.inner.1", "0.inner.2", "0", "1.inner.0", "1.inner.1", "1.inner.2", "1", "2"]),
        (2, ["0.inner.0 0.inner.1", "0.inner.2", "1.inner.0 1.inner.1", "1.inner.2", "0 1", "2"]),
        (3, ["0.inner.0 0.inner.1 0.inner.2", "1.inner.0 1.inner.1 1.inner.2", "0 1 2"]),
    ],
)
def test_neighbours_are_children_of_one_module_and_inner_ones_come_first(size: int, groups: list[str]) -> None:
    model = nn.Sequential(Holder(), Holder(), Block())
    units = sharding_units(model, (Block,), config("sharding=per_block").sharding)
    assert [" ".join(names_of(model, group)) for group in in_groups(model, units, size)] == groups
    assert Counter(map(id, units)) == Counter(id(m) for group in in_groups(model, units, size) for m in group)
