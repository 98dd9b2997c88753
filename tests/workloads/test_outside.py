"""A model and a data set of another package train, and are forecast, like those of the package."""

from __future__ import annotations

from fsdp_lab.forecast.forecast import forecast_profile
from tests.ranks import config, run_ranks, train_all

WORDS = ("model=custom", "model._target_=tests.workloads.tiny.Tiny", "model.width=16", "model.num_layers=2",
         "data=custom",
         "data._target_=tests.workloads.tiny.DarkOrBright",
         "optimizer.lr=0.01", "data.num_train=null", "data.num_val=null", "memory_profile=peaks")  # fmt: skip
SHARDINGS = ("per_block", "ddp")


def test_a_model_and_a_data_set_of_another_package_learn_and_are_forecast() -> None:
    cases = [[*WORDS, f"sharding={sharding}", "training.epochs=5"] for sharding in SHARDINGS]
    first, second = run_ranks(2, train_all, cases)
    for sharding, (_, (*_, one)), (_, (*_, other)) in zip(SHARDINGS, first, second, strict=True):
        assert one["val/loss"] == other["val/loss"]
        assert one["val/accuracy"] == 1.0, "dark and bright are easily told apart"
        peaks = forecast_profile(config(*WORDS, f"sharding={sharding}"), 2, cuda=False).peaks["device"]
        assert peaks["total"] == one["memory/peak_bytes"]
