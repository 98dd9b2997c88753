"""A model and a data set that another package registers train, and are forecast, like those of the package."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp_lab.config import ConfigError
from fsdp_lab.config.registry import REGISTRY, register
from fsdp_lab.forecast.forecast import forecast_profile
from tests.ranks import Memo, config, run_ranks

WORDS = ("model.family=tiny", "model.image_size=4", "model.num_layers=2", "data.name=tiny", "model.num_classes=2",
         "optimizer.lr=0.01", "data.num_train=null", "data.num_val=null", "memory_profile=peaks")  # fmt: skip
SHARDINGS = ("per_block", "ddp")


def register_tiny() -> None:
    register("model.family", "tiny", "tests.workloads.tiny")
    register("data.name", "tiny", "tests.workloads.tiny")


def train_each() -> list[dict[str, float]]:
    """On each rank: the last metrics of each sharding."""
    from fsdp_lab.training import train

    register_tiny()
    results = []
    for sharding in SHARDINGS:
        memo = Memo()
        with tempfile.TemporaryDirectory() as folder:
            train(config(*WORDS, f"sharding={sharding}", "training.epochs=5"), Path(folder), memo)
        results.append(memo.reported[-1])
    return results


@pytest.fixture
def registered() -> Iterator[None]:
    register_tiny()
    yield
    del REGISTRY["model.family"]["tiny"], REGISTRY["data.name"]["tiny"]


@pytest.mark.usefixtures("registered")
def test_a_model_and_a_data_set_of_another_package_learn_and_are_forecast() -> None:
    first, second = run_ranks(2, train_each)
    for sharding, one, other in zip(SHARDINGS, first, second, strict=True):
        assert one["val/loss"] == other["val/loss"]
        assert one["val/accuracy"] == 1.0, "dark and bright are easily told apart"
        peaks = forecast_profile(config(*WORDS, f"sharding={sharding}"), 2, cuda=False).peaks["device"]
        assert peaks["total"] == one["memory/peak_bytes"]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("model.family=cnn", "model.family=cnn is not an option. Choose one of: vit, mlp."),
        ("data.name=cifar", "data.name=cifar is not an option. Choose one of: digits, fashion_mnist, synthetic."),
    ],
)
def test_an_unknown_name_is_refused_with_those_that_are_known(word: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(word).check(2)
    assert str(caught.value) == message
