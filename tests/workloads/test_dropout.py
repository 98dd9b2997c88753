"""Dropout on several workers: the same masks in every sharding, and after a resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity import VIT, WORKLOADS
from tests.ranks import run_ranks, train_all
from tests.training.reference import apart

pytestmark = pytest.mark.ci

Losses = list[float]

WORDS = [*WORKLOADS["user"].words, *VIT, "model.dropout=0.5", "training.global_batch_size=8"]
CELLS = (
    "sharding=ddp",
    "sharding=root",
    "sharding=per_block",
    "sharding=per_layer",
    "sharding=size_based sharding.min_num_params=80",
    "sharding=per_block init=meta",
    "sharding=per_block activation_checkpointing=full",
)
STOPPED = ("sharding=ddp", "sharding=per_block")


def train(folder: str) -> tuple[dict[str, Losses], dict[str, Losses]]:
    """On one rank: the losses of each cell, and those of two with a stop after three of an epoch's eight steps."""
    whole = train_all([[*WORDS, *cell.split()] for cell in CELLS])
    stopped = {}
    for cell in STOPPED:
        own = Path(folder, cell)
        own.mkdir(exist_ok=True)
        words = [*WORDS, cell, "checkpoint.mode=sync"]
        begun, resumed = train_all([[*words, "training.max_steps=3"], words], str(own))
        stopped[cell] = [*begun[0], *resumed[0]]
    return dict(zip(CELLS, (losses for losses, _ in whole), strict=True)), stopped


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Losses], dict[str, Losses]]:
    return run_ranks(2, train, str(tmp_path_factory.mktemp("stopped")))[0]


def test_masks_are_the_same_in_every_sharding_of_as_many_workers(
    trained: tuple[dict[str, Losses], dict[str, Losses]],
) -> None:
    whole, _ = trained
    first = whole[CELLS[0]]
    for cell, losses in whole.items():
        assert apart(losses, first) <= 1e-5, cell
    (alone, _), (without, _) = run_ranks(
        1, train_all, [[*WORDS, CELLS[0], *more] for more in ([], ["model.dropout=0"])]
    )[0]
    assert apart(first, alone) > 1e-3, "other workers, other masks: docs/your-model.md says so"
    assert apart(alone, without) > 1e-2, "it does drop"


@pytest.mark.parametrize("cell", STOPPED)
def test_masks_go_on_in_the_middle_of_an_epoch_as_if_never_stopped(
    trained: tuple[dict[str, Losses], dict[str, Losses]], cell: str
) -> None:
    """To the bit."""
    whole, stopped = trained
    assert len(whole[cell]) == 16 and stopped[cell] == whole[cell]
