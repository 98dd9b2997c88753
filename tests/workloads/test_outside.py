"""A model and a data set of another package train, and are forecast, like those of the package."""

from __future__ import annotations

import tempfile
from pathlib import Path

from fsdp_lab.forecast.forecast import forecast_profile
from tests.ranks import Memo, config, run_ranks

WORDS = ("model=custom", "model._target_=tests.workloads.tiny.Tiny", "model.width=16", "model.num_layers=2",
         "data=custom",
         "data._target_=tests.workloads.tiny.DarkOrBright",
         "optimizer.lr=0.01", "data.num_train=null", "data.num_val=null", "memory_profile=peaks")  # fmt: skip
SHARDINGS = ("per_block", "ddp")


def train_each() -> list[dict[str, float]]:
    """On each rank: the last metrics of each sharding."""
    from fsdp_lab.training import train

    results = []
    for sharding in SHARDINGS:
        memo = Memo()
        with tempfile.TemporaryDirectory() as folder:
            train(config(*WORDS, f"sharding={sharding}", "training.epochs=5"), Path(folder), memo)
        results.append(memo.reported[-1])
    return results


def test_a_model_and_a_data_set_of_another_package_learn_and_are_forecast() -> None:
    first, second = run_ranks(2, train_each)
    for sharding, one, other in zip(SHARDINGS, first, second, strict=True):
        assert one["val/loss"] == other["val/loss"]
        assert one["val/accuracy"] == 1.0, "dark and bright are easily told apart"
        peaks = forecast_profile(config(*WORDS, f"sharding={sharding}"), 2, cuda=False).peaks["device"]
        assert peaks["total"] == one["memory/peak_bytes"]
