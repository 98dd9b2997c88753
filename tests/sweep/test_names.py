"""What trials and sweeps are called in MLflow's lists."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import DictConfig

from fsdp_lab.compose import Trial
from fsdp_lab.config import SweepConfig, from_dict
from fsdp_lab.sweep.names import short_name, sweep_name


def trial(choices: dict[str, str] | None = None, **values: dict[str, object]) -> Trial:
    return Trial(0, from_dict(SweepConfig, values), choices or {}, [], Path(), DictConfig({}))


@pytest.mark.parametrize(
    ("lr", "name"),
    [(0.0012345678, "lr=0.00123"), (0.001, "lr=0.001"), (3e-05, "lr=3e-05"), (0.5, "lr=0.5"), (123456.7, "lr=123457")],
)
def test_numbers_in_a_trials_name_are_rounded(lr: float, name: str):
    assert short_name(trial(optimizer={"lr": lr}), ["optimizer.lr"]) == name


def test_whole_numbers_and_options_are_not():
    one = trial({"sharding": "root"}, training={"seed": 1234567})
    assert short_name(one, ["sharding", "training.seed"]) == "root seed=1234567"


def test_a_sweep_is_called_by_what_it_compares():
    some = [trial({"sharding": "root", "experiment": "null"})] * 6
    assert sweep_name(some, ["sharding", "optimizer.lr"]) == "sharding × lr (6 trials)"
    assert sweep_name([trial({"experiment": "zero2_zero3"})], []) == "zero2_zero3: one setting (1 trial)"
    assert sweep_name([trial(search={"name": "optuna"})] * 2, ["+model.width"]) == "width (optuna, 2 trials)"
