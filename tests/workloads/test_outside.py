"""What the package does not know trains like its own: a registered model and data set, and another kind of batch."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_lab.config import ConfigError
from fsdp_lab.config.registry import REGISTRY, register
from fsdp_lab.forecast import forecast
from fsdp_lab.training import train
from fsdp_lab.workloads import Data, DataSpec, ModelSpec, Workload
from tests.ranks import Memo, config, run_ranks

WORDS = ("model.family=tiny", "model.image_size=4", "model.num_layers=2", "data.name=tiny", "model.num_classes=2",
         "optimizer.lr=0.01", "data.num_train=null", "data.num_val=null", "memory_profile=peaks")  # fmt: skip


TINY = {"per_block": ["sharding=per_block", "training.epochs=5"], "ddp": ["sharding=ddp", "training.epochs=5"],
        "short": ["training.max_steps=2"]}  # fmt: skip
SUMS = {"long": ["training.epochs=40", "optimizer.lr=0.05"], "short": ["training.max_steps=2"]}
Reported = dict[str, dict[str, float]]


def train_each() -> tuple[Reported, Reported]:
    """On each rank: the last metrics of each trial, of the package's model and of the sums."""
    register("model.family", "tiny", "tests.workloads.tiny")
    register("data.name", "tiny", "tests.workloads.tiny")
    tiny = {name: train_here(words) for name, words in TINY.items()}
    with (
        mock.patch("fsdp_lab.training.train.build_workload", addition),
        mock.patch("fsdp_lab.config.trial.TrialConfig.check"),
    ):
        return tiny, {name: train_here(words) for name, words in SUMS.items()}


def train_here(words: list[str]) -> dict[str, float]:
    memo = Memo()
    with tempfile.TemporaryDirectory() as folder:
        train(config(*WORDS, *words), Path(folder), memo)
    return memo.reported[-1]


@pytest.fixture(scope="module")
def trained() -> list[tuple[Reported, Reported]]:
    """Of each of two ranks."""
    return run_ranks(2, train_each)


@pytest.mark.parametrize("sharding", ["per_block", "ddp"])
def test_a_model_and_a_data_set_of_another_package_learn(
    trained: list[tuple[Reported, Reported]], sharding: str
) -> None:
    reported, other = (tiny[sharding] for tiny, _ in trained)
    assert reported["val/loss"] == other["val/loss"]
    assert reported["val/accuracy"] == 1.0, "dark and bright are easily told apart"
    assert reported["memory/param_bytes"] > 0


def test_their_memory_is_forecast_to_the_byte(trained: list[tuple[Reported, Reported]]) -> None:
    register("model.family", "tiny", "tests.workloads.tiny")
    register("data.name", "tiny", "tests.workloads.tiny")
    try:
        peaks = forecast.forecast_profile(config(*WORDS), 2, cuda=False).peaks["device"]
    finally:
        del REGISTRY["model.family"]["tiny"], REGISTRY["data.name"]["tiny"]
    assert peaks["total"] == trained[0][0]["short"]["memory/peak_bytes"]


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


class Sums:
    """Batches are dictionaries, and what is learned is no class: the sum of two numbers."""

    def __init__(self, count: int) -> None:
        self.terms = torch.linspace(-1, 1, 2 * count).view(count, 2)

    def __len__(self) -> int:
        return len(self.terms)

    def __getitem__(self, indices: Tensor) -> dict[str, Any]:
        terms = self.terms[indices]
        return {"terms": terms, "nested": {"sum": terms.sum(1), "counted": indices >= 0}}


class Addition:
    unit = "sums"

    def forward(self, model: nn.Module, batch: dict[str, Any]) -> Tensor:
        return model(batch["terms"]).squeeze(1)

    def loss(self, outputs: Tensor, batch: dict[str, Any]) -> Tensor:
        return F.mse_loss(outputs.float(), batch["nested"]["sum"])

    def metrics(self, outputs: Tensor, batch: dict[str, Any]) -> dict[str, tuple[Tensor, Tensor]]:
        counted = batch["nested"]["counted"]
        errors = (outputs.float() - batch["nested"]["sum"])[counted]
        return {"loss": (errors.square().sum(), counted.sum()), "off_by": (errors.abs().sum(), counted.sum())}


def addition(*_: object) -> Workload:
    def example(size: int) -> dict[str, Any]:
        nested = {"sum": torch.empty(size), "counted": torch.empty(size, dtype=torch.bool)}
        return {"terms": torch.empty(size, 2), "nested": nested}

    model = ModelSpec(lambda: nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 1)), (nn.Linear,), "adder")
    data = DataSpec(lambda: None, lambda: Data(Sums(64), Sums(9), "digest"), example)
    return Workload(model, data, Addition())


def test_training_does_not_look_into_a_batch(trained: list[tuple[Reported, Reported]]) -> None:
    reported = trained[0][1]["long"]
    assert reported["val/loss"] < 0.05 and reported["val/off_by"] < 0.3
    assert reported["train/loss"] < 0.1


def test_a_forecast_does_not_look_into_a_batch(
    trained: list[tuple[Reported, Reported]], monkeypatch: pytest.MonkeyPatch
) -> None:
    reported = trained[0][1]["short"]
    monkeypatch.setattr(forecast, "build_workload", addition)
    peaks = forecast.forecast_profile(config(), 2, cuda=False).peaks["device"]
    assert {name: size for name, size in peaks.items() if name != "total"} == {
        name: reported[f"memory/{name}_bytes"] for name in peaks if name != "total"
    }


def test_flops_are_those_of_the_task() -> None:
    assert addition().train_flops_per_sample() == 3 * 2 * (2 * 8 + 8)
