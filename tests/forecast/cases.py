"""Configurations for the comparison of what was measured with what was forecast."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

AXES: dict[str, Sequence[str]] = {
    "sharding": ("ddp", "root", "per_block", "per_layer", "size_based"),
    "precision": ("fp32", "bf16", "bf16_mixed", "fp16", "fp16_mixed", "grad_bf16"),
    "offload": ("none", "cpu"),
    "reshard_after_forward": ("always", "never", "default", "to_size"),
    "optimizer": ("adam", "adamw", "sgd"),
    "training.grad_accum_steps": ("1", "2"),
    "activation_checkpointing": ("none", "full"),
    "training.max_grad_norm": ("null", "1.0"),
}
Case = dict[str, str]


def has_a_meaning(case: Case) -> bool:
    return case["sharding"] != "ddp" or (case["offload"] == "none" and case["reshard_after_forward"] == "default")


def overrides(case: Case) -> list[str]:
    """As they are typed, with what some options want besides."""
    more = {
        "size_based": ["sharding.min_num_params=20000"],
        "to_size": ["reshard_after_forward.size=2"],
    }
    return [f"{key}={value}" for key, value in case.items()] + [
        word for value in case.values() for word in more.get(value, ())
    ]


def pairs(case: Case) -> set[tuple[tuple[str, str], ...]]:
    return set(itertools.combinations(case.items(), 2))


def pairwise(seed: int = 0) -> list[Case]:
    """Cases in which every two values of different axes that can stand together do so at least once.

    Greedy: the best of some random cases, again and again.
    """
    rng = random.Random(seed)
    every = [dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())]
    every = [case for case in every if has_a_meaning(case)]
    left = set().union(*(pairs(case) for case in every))
    chosen = []
    while left:
        some = rng.sample(every, 200)
        best = max(some, key=lambda case: len(pairs(case) & left))
        if pairs(best) & left:
            chosen.append(best)
            left -= pairs(best)
    return chosen


def every_four_axes() -> list[Case]:
    """Every sharding x precision x offload x reshard_after_forward, the other four axes in turn."""
    others = itertools.cycle(itertools.product(*list(AXES.values())[4:]))
    four = itertools.product(*list(AXES.values())[:4])
    cases = [dict(zip(AXES, (*values, *next(others)), strict=True)) for values in four]
    return [case for case in cases if has_a_meaning(case)]
