"""`checkpoint.export_best`: what is exported is the epoch with the least validation loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_lab.config import CombinationError
from tests.ranks import Memo, config, run_ranks

# Each epoch's learning rate is four times the last one's, so that the last epochs are worse than those before.
WORSE = ["training.epochs=6", "lr_schedule=step", "lr_schedule.gamma=4", "data.num_train=32", "export=true"]
CASES = {
    "sync": ["sharding=per_block", "activation_checkpointing=full", "checkpoint.mode=sync"],
    "async": ["sharding=per_layer", "checkpoint.mode=async"],
    "ddp": ["sharding=ddp", "checkpoint.mode=sync"],
}


def train_each(folder: str) -> dict[str, tuple[int, Any, Any, Any]]:
    """Of each case: the best epoch, and the weights of `export_best`, of the last step, and of a run that ends there.

    Every rank returns it: those of a run on as many ranks are equal to the bit."""
    from fsdp_lab.training import train

    def weights(name: str, *words: str) -> tuple[list[float], dict[str, torch.Tensor]]:
        memo, own = Memo(), Path(folder, name)
        own.mkdir(exist_ok=True)
        train(config(*WORSE, *words), own, memo)
        dist.barrier()  # the first rank has written it
        content = torch.load(own / "model.pt", weights_only=True)
        return [reported["val/loss"] for reported in memo.reported], content["state_dict"]

    results = {}
    for name, words in CASES.items():
        losses, best = weights(name, *words, "checkpoint.export_best=true")
        epoch = losses.index(min(losses))
        _, last = weights(f"{name}_last", *words)
        _, there = weights(f"{name}_there", *words, f"training.max_steps={epoch + 1}")
        results[name] = (epoch, best, last, there)
    return results


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, Any, Any, Any]]:
    return run_ranks(2, train_each, str(tmp_path_factory.mktemp("best")))[0]


@pytest.mark.parametrize("name", CASES)
def test_the_weights_of_the_best_epoch_are_exported(trained: dict[str, Any], name: str) -> None:
    epoch, best, last, there = trained[name]
    assert 0 <= epoch < 5, "the last epoch is not the best"
    assert best.keys() == there.keys()
    assert all(torch.equal(best[key], there[key]) for key in there)
    assert not all(torch.equal(best[key], last[key]) for key in last)


@pytest.mark.parametrize("lacks", ["checkpoint.mode=off", "checkpoint.keep_best=false"])
def test_what_is_not_kept_is_not_exported(lacks: str) -> None:
    with pytest.raises(
        CombinationError, match=f"checkpoint.export_best=true with {lacks}: there is no best checkpoint"
    ):
        config("checkpoint.mode=sync", "checkpoint.export_best=true", lacks).check(2)
