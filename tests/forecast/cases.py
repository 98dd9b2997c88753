"""Configurations for the comparison of what was measured with what was forecast."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from functools import cache

AXES: dict[str, Sequence[str]] = {
    "sharding": ("ddp", "root", "per_block", "per_layer", "size_based"),
    "precision": ("fp32", "bf16", "bf16_mixed", "fp16", "fp16_mixed", "grad_bf16"),
    "offload": ("none", "cpu"),
    "reshard_after_forward": ("always", "never", "default", "to_size"),
    "optimizer": ("adam", "adamw", "sgd", "custom"),
    "training.grad_accum_steps": ("1", "2"),
    "activation_checkpointing": ("none", "full", "every_n", "selective"),
    "training.max_grad_norm": ("null", "0.1"),
    "sharding.blocks_per_unit": ("1", "2"),
    "sharding.forward_prefetch": ("null", "2"),
    "sharding.backward_prefetch": ("null", "1"),
    "init": ("rank0", "meta", "device"),
    "training.sync_each_microbatch": ("false", "true"),
    "sharding.separate_reduce_scatter_group": ("false", "true"),
}
Case = dict[str, str]
Pair = tuple[tuple[str, str], tuple[str, str]]

MODELS = {
    "mlp": ["model=mlp", "model.num_layers=2"],  # two blocks: every second one is not every one
    "vit_tiny": ["model=vit_tiny"],
    "vit_b_16": ["model=vit_b_16"],
}
# What can stand beside some values of others.
_ONLY_PLAIN_WITH_DDP = {
    "offload": "none",
    "reshard_after_forward": "default",
    "sharding.forward_prefetch": "null",
    "sharding.backward_prefetch": "null",
    "sharding.separate_reduce_scatter_group": "false",
}
_PER_BLOCK_ALONE = {"sharding.blocks_per_unit": "1"}


def can_stand_together(pair: Pair) -> bool:
    values = dict(pair)
    sharding = values.get("sharding")
    plain = _ONLY_PLAIN_WITH_DDP if sharding == "ddp" else {}
    plain = plain | (_PER_BLOCK_ALONE if sharding not in ("per_block", None) else {})
    if sharding in ("per_layer", "size_based") and values.get("activation_checkpointing") == "selective":
        return False
    return all(values.get(axis, only) == only for axis, only in plain.items())


def has_a_meaning(case: Case) -> bool:
    return all(map(can_stand_together, pairs(case)))


def overrides(case: Case) -> list[str]:
    """As they are typed, with what some options want besides."""
    more = {
        "size_based": ["sharding.min_num_params=1000"],
        "adam": ["optimizer.lr=0.01"],
        "adamw": ["optimizer.lr=0.01"],
        "custom": ["optimizer._target_=torch.optim.RAdam", "optimizer.lr=0.01"],
        "to_size": ["reshard_after_forward.size=2"],
    }
    return [f"{key}={value}" for key, value in case.items()] + [
        word for value in case.values() for word in more.get(value, ())
    ]


def pairs(case: Case) -> set[Pair]:
    return set(itertools.combinations(case.items(), 2))


@cache
def pairwise(seed: int = 0) -> list[Case]:
    """Return cases in which every two values of different axes that can stand together do so at least once.

    Greedy: of some random cases with the first pair that is missing, the one with the most that are missing.
    """
    rng = random.Random(seed)
    axes = itertools.combinations(AXES.items(), 2)
    every = (((a, x), (b, y)) for (a, of_a), (b, of_b) in axes for x, y in itertools.product(of_a, of_b))
    left = set(filter(can_stand_together, every))
    chosen = []
    while left:
        some = [_random_case(rng, min(left)) for _ in range(20)]
        chosen.append(max(some, key=lambda case: len(pairs(case) & left)))
        left -= pairs(chosen[-1])
    return chosen


def _random_case(rng: random.Random, fixed: Sequence[tuple[str, str]]) -> Case:
    while True:
        case = {axis: rng.choice(values) for axis, values in AXES.items()} | dict(fixed)
        if has_a_meaning(case):
            return case


def every_four_axes() -> list[Case]:
    """Every sharding x precision x offload x reshard_after_forward that has a meaning, the other axes at random."""
    rng = random.Random(0)
    four = (dict(zip(AXES, values, strict=False)) for values in itertools.product(*list(AXES.values())[:4]))
    return [_random_case(rng, tuple(case.items())) for case in four if has_a_meaning(case)]
