"""What trials and sweeps are called in MLflow's lists."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import DictConfig

from fsdp_lab.compose import Trial
from fsdp_lab.config import SweepConfig, from_dict
from fsdp_lab.sweep.names import report_command, resume_command, resume_lines, short_name, sweep_name, ui_command


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


def test_the_store_is_named_as_short_as_it_can_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    command = "python -m mlflow ui --backend-store-uri"
    assert ui_command("sqlite:///outputs/mlflow.db") == f"{command} sqlite:///outputs/mlflow.db"
    assert ui_command(f"sqlite:///{tmp_path}/a.db") == f"{command} sqlite:///a.db"
    assert ui_command("sqlite:////srv/a.db?timeout=9") == f"{command} 'sqlite:////srv/a.db?timeout=9'"
    assert ui_command("postgresql://host/runs") == f"{command} postgresql://host/runs"
    assert ui_command("http://host:5000") == "http://host:5000"


def test_commands_name_a_folder_that_is_there_where_they_are_typed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["fsdp_lab", "-m", "sharding=ddp,root", "cluster.storage_path=s3://bucket/lab"])
    folder = tmp_path / "outputs" / "1"
    assert resume_lines(folder) == ["to resume: python -m fsdp_lab resume=outputs/1"]
    assert report_command(folder) == "python -m fsdp_lab.report sweep=outputs/1"
    assert resume_command(tmp_path.parent) == f"python -m fsdp_lab resume={tmp_path.parent}"
