"""A loss that is not finite ends a trial soon, and on every rank alike."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import pytest
import torch

from fsdp_lab.training.divergence import DivergedError, LossCheck
from tests.ranks import Memo, config, run_ranks

LAST = 60


def steps_until_it_ends(cases: list[tuple[int, dict[int, float]]]) -> list[tuple[int, str]]:
    """Of each case `(step, {rank: loss})`: how many steps this rank took, and the message."""
    import torch.distributed as dist

    results = []
    for bad, by_rank in cases:
        check, step = LossCheck(0, torch.device("cpu")), 0
        try:
            for step in range(1, LAST + 1):
                loss = by_rank.get(dist.get_rank(), 1.0) if step == bad else 1.0
                check.add(torch.tensor(loss))
            check.finish()
            results.append((step, ""))
        except DivergedError as error:
            results.append((step, str(error)))
    return results


def test_it_ends_within_twenty_steps_and_names_the_step_and_the_rank() -> None:
    cases = [(step, {1: math.nan}) for step in range(1, LAST + 1)]
    ranks = run_ranks(2, steps_until_it_ends, [*cases, (7, {0: math.inf, 1: math.nan}), (0, {})])
    assert ranks[0] == ranks[1]
    *seen, both, none = ranks[0]
    for (step, _), (taken, message) in zip(cases, seen, strict=True):
        assert message == f"the loss of step {step} is nan on rank 1"
        assert taken == -(-step // 10) * 10
    assert both == (10, "the loss of step 7 is inf on rank 0 and 1 more")
    assert none == (LAST, "")


class Steps(Memo):
    """Also counts the steps that began."""

    begun = 0

    def step(self, step: int) -> None:
        self.begun = step


def train_with_a_huge_rate(num_train: int) -> tuple[int, int, str]:
    from fsdp_lab.training.divergence import DivergedError
    from fsdp_lab.training.train import train

    memo = Steps()
    words = ("model=mlp", "optimizer.lr=1e30", f"data.num_train={num_train}", "training.global_batch_size=16")
    with tempfile.TemporaryDirectory() as folder:
        try:
            train(config(*words), Path(folder), memo)
        except DivergedError as error:
            return memo.begun, len(memo.reported), str(error)
    return memo.begun, len(memo.reported), ""


@pytest.mark.parametrize(("steps", "at_most"), [(80, 12), (5, 5)])
def test_a_trial_does_not_finish_its_epoch(steps: int, at_most: int) -> None:
    for begun, epochs, message in run_ranks(2, train_with_a_huge_rate, steps * 16):
        assert message == "the loss of step 2 is nan on rank 0 and 1 more"
        assert (begun <= at_most, epochs) == (True, 0)
