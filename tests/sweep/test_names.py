"""What a sweep and its trials are called, and what a report takes from the words."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from fsdp_lab.config import SweepConfig, from_dict
from fsdp_lab.config.compose import Trial
from fsdp_lab.record.sweep_json import SweepStart
from fsdp_lab.sweep.grid import enumerate_grid
from fsdp_lab.sweep.names import (
    report_command,
    resume_command,
    resume_lines,
    run_name,
    setting_text,
    short_name,
    sweep_name,
    ui_command,
)
from fsdp_lab.sweep.outputs.results_csv import rows_of
from fsdp_lab.sweep.plan import plan_sweep
from fsdp_lab.sweep.state import TrialState
from fsdp_lab.sweep.sweep import Sweep
from fsdp_lab.sweep.sweep_data import sweep_of
from tests.sweep.planted import sweep_of as planned_sweep


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


OWN_VALUES = [
    ["{a:1}", "{b:2}", "{a:{b:[1,null]}}", "{}"],
    ["1", "'1'", "1.0", "true", "'true'", "null", "'null'"],
    ["[1]", "['1']", "[{a:1}]", "[{a:2}]", "[]", "[1,[2]]"],
    ["0.1", "0.10000001"],
    ["'介绍'", "'a b'", "s3://bucket/x"],
]


@pytest.mark.parametrize("values", OWN_VALUES)
def test_values_of_the_users_own_are_shown_as_typed_and_are_settings_of_their_own(
    parser: OverridesParser, compose_trial, values: list[str]
):
    """Of whatever type: by the table, the report and `results.csv`."""
    words = ["model._target_=collections.ChainMap", f"model.table={','.join(values)}"]
    plan = plan_sweep(enumerate_grid(parser, {}, words), compose_trial, lambda config: None)
    assert [setting_text(trial, "model.table") for trial in plan.trials] == values
    assert [short_name(trial, ["model.table"]) for trial in plan.trials] == [f"table={value}" for value in values]
    states = [TrialState(trial) for trial in plan.trials]
    planned = planned_sweep(states, swept=["model.table"])
    assert [row["model.table"] for row in rows_of(planned, lambda number: "")] == values


def test_a_group_that_is_swept_as_a_whole_is_shown_as_typed(parser: OverridesParser, compose_trial):
    grid = enumerate_grid(parser, {}, ["training={epochs:3},{epochs:4,seed:1}"])
    plan = plan_sweep(grid, compose_trial, lambda config: None)
    assert [run_name(trial, ["training"]) for trial in plan.trials] == [
        "training={epochs:3}",
        "training={epochs:4,seed:1}",
    ]


def test_close_numbers_of_a_grid_have_all_their_digits_and_those_of_a_search_six():
    grid = [trial(training={"max_grad_norm": x}) for x in (0.1, 0.10000001)]
    assert [setting_text(one, "training.max_grad_norm") for one in grid] == ["0.1", "0.10000001"]
    drawn = trial(search={"name": "random"}, training={"max_grad_norm": 0.123456789})
    assert setting_text(drawn, "training.max_grad_norm") == "0.123457"


def test_a_sweep_is_called_by_what_it_compares():
    some = [trial({"sharding": "root", "experiment": "null"})] * 6
    assert sweep_name(some, ["sharding", "optimizer.lr"]) == "sharding × lr (6 trials)"
    assert sweep_name([trial({"experiment": "zero2_zero3"})], []) == "zero2_zero3: one setting (1 trial)"
    assert sweep_name([trial(search={"name": "optuna"})] * 2, ["+model.width"]) == "width (optuna, 2 trials)"


def test_the_store_is_named_as_typed():
    command = "python -m mlflow ui --backend-store-uri"
    assert ui_command("sqlite:///outputs/mlflow.db") == f"{command} sqlite:///outputs/mlflow.db"
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


def test_the_workers_are_those_that_trained(compose_trial, tmp_path: Path):
    trials = [compose_trial(["cluster.num_workers=null", f"training.seed={i}"], i) for i in range(3)]
    states = [TrialState(trial) for trial in trials]
    record = SweepStart.of([], True, SweepConfig())
    sweep = Sweep(states, trials[0].config, tmp_path, [], record)
    assert "workers" not in dict(sweep_of(sweep, lambda number: "").about), "none has started"
    states[1].facts, states[2].facts = {"world_size": 8}, {"world_size": 4}
    assert dict(sweep_of(sweep, lambda number: "").about)["workers"] == "4, 8"
