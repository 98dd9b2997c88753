"""The first weights of a trial, which are those of a plain script, to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import ClassVar

import torch

from fsdp_lab.forecast.fake import fake_world
from fsdp_lab.training.weights import init_weights
from fsdp_lab.workloads.construct import Blueprint
from tests.parity import SHARDINGS, WORKLOADS
from tests.ranks import config, run_ranks
from tests.training.reference import first_weights

INITS = ("rank0", "meta", "device")


def initial_weights(cases: list[list[str]]) -> list[tuple[dict[str, torch.Tensor], int]]:
    """`(full first weights, number of parameters whose values this rank built)` of each case."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    from fsdp_lab.training.build import build
    from fsdp_lab.training.distributed import build_parallel_dims, setup_distributed
    from fsdp_lab.training.weights import init_weights
    from fsdp_lab.workloads.build import build_model_spec

    values, given = Blueprint.values, [0]

    def counted(blueprint: Blueprint, *device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in values(blueprint, *device):
            given[0] += 1
            yield name, value

    Blueprint.values = counted  # type: ignore[method-assign]
    ranks, results = setup_distributed(), []
    for case in cases:
        given[0] = 0
        trial = config(*case)
        spec, dims = build_model_spec(trial.model), build_parallel_dims(trial.sharding, ranks)
        init = partial(init_weights, config=trial, device=ranks.device)
        state = build(spec, trial, dims, ranks.device, materialize=init)
        full = get_model_state_dict(state.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        results.append((dict(full), given[0]))
    return results


def test_every_sharding_and_init_starts_from_the_same_bits() -> None:
    seeded = ("training.seed=7", "activation_checkpointing=full")
    small = ("model.num_layers=2",)
    cases = [[*SHARDINGS[s], f"init={init}", *small] for s, init in product(SHARDINGS, INITS)]
    cases += [["sharding=per_block", f"init={init}", *small, *seeded] for init in INITS]
    cases += [["offload=cpu", f"init={init}", *WORKLOADS["mlp"].words] for init in INITS]
    first, second = run_ranks(2, initial_weights, cases)
    for case, (got, built_first), (_, built_second) in zip(cases, first, second, strict=True):
        expected = first_weights(config(*case))
        assert got.keys() == expected.keys(), case
        assert all(torch.equal(got[key], expected[key]) for key in expected), case
        assert built_first == len(expected), case
        assert built_second == (0 if "init=rank0" in case else len(expected)), case


class Seen(Blueprint):
    """Notes the devices on which its values are computed."""

    devices: ClassVar[list[torch.device]] = []

    def values(self, device: torch.device | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        self.devices.append(device or torch.device("cpu"))
        return super().values(*filter(None, [device]))


def test_with_init_device_the_constructor_computes_where_the_model_does() -> None:
    """`meta` stands for a GPU."""
    gpu, Seen.devices[:] = torch.device("meta"), []
    for init in INITS:
        trial = config(f"init={init}", "sharding=ddp")
        with fake_world(2, gpu):
            blueprint = Seen(lambda: torch.nn.Linear(4, 3), seed=0)
            init_weights(blueprint.model, blueprint, trial, gpu)
    assert Seen.devices == [torch.device("cpu"), torch.device("cpu"), gpu]
