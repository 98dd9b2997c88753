"""A real sweep, real Ray: what it prints, leaves in its folder and in MLflow, and that it trains the same."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from mlflow.entities import Run

from fsdp_lab.config import NightlyConfig, from_dict
from fsdp_lab.metrics import declared, is_mib_key
from tests import forked
from tests.conftest import STORE, run_cli
from tests.ranks import Memo, run_ranks
from tests.sweep.conftest import PLAIN, TINY, artifacts, history, results, runs, store

pytestmark = [pytest.mark.timeout(400)]

GRID = ("sharding=ddp,per_block", "offload=none,cpu", "reshard_after_forward=always", "precision=fp32", "-m")
TRIALS = [("ddp", "none"), ("per_block", "none"), ("per_block", "cpu")]
DIGITS = "digits"


class Swept(NamedTuple):
    folder: Path
    done: subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Swept:
    folder = tmp_path_factory.mktemp("sweep")
    return Swept(folder, run_cli(folder, *GRID, *TINY, timeout=390))


@pytest.fixture
def children(swept: Swept) -> list[Run]:
    return runs(swept.folder)[1]


def test_it_ends_with_0_and_reports_each_trial(swept: Swept):
    assert swept.done.returncode == 0, swept.done.stderr
    assert "Traceback" not in swept.done.stdout + swept.done.stderr
    for number in range(3):
        assert f"trial {number} finished" in swept.done.stdout
        assert f"trial {number}:  epoch 2/2" in swept.done.stdout


def test_the_combination_without_a_meaning_is_reported_once_with_its_reason(swept: Swept):
    (line,) = [line for line in swept.done.stdout.splitlines() if line.startswith("left out")]
    assert line.startswith("left out 1: sharding=ddp with offload=cpu: DDP keeps every parameter")


def test_the_folder_is_as_hydra_leaves_one(swept: Swept):
    out = swept.folder / "out"
    multirun = yaml.safe_load((out / "multirun.yaml").read_text())
    assert multirun["hydra"]["overrides"]["task"] == [a for a in (*GRID, *TINY) if a != "-m" and "hydra." not in a]
    assert sorted(d.name for d in out.iterdir() if d.name.isdigit()) == ["0", "1", "2"]
    for number, (sharding, offload) in enumerate(TRIALS):
        trial = out / str(number)
        config = yaml.safe_load((trial / ".hydra" / "config.yaml").read_text())
        assert config["sharding"]["granularity"] == sharding and config["offload"]["target"] == offload
        assert "hydra" not in config
        hydra = yaml.safe_load((trial / ".hydra" / "hydra.yaml").read_text())["hydra"]
        assert hydra["job"]["num"] == number and hydra["runtime"]["choices"]["sharding"] == sharding
        overrides = yaml.safe_load((trial / ".hydra" / "overrides.yaml").read_text())
        assert f"sharding={sharding}" in overrides and f"offload={offload}" in overrides
        assert {log.name for log in (trial / "logs").iterdir()} == {"rank0.log", "rank1.log"}


def test_results_csv_has_a_row_a_trial(swept: Swept, children: list[Run]):
    rows = results(swept.folder)
    assert [(row["sharding"], row["offload"]) for row in rows] == TRIALS
    for number, (row, run) in enumerate(zip(rows, children, strict=True)):
        assert (row["trial"], row["status"], row["epoch"], row["error"]) == (str(number), "finished", "2", "")
        assert row["run_id"] == run.info.run_id
        assert Path(row["folder"]) == swept.folder / "out" / str(number)
        assert float(row["val/loss"]) == pytest.approx(run.data.metrics["val/loss"])
        assert float(row["seconds"]) > 0 and float(row["perf/samples_per_s"]) > 0


def test_mlflow_has_one_parent_and_its_children(swept: Swept, children: list[Run]):
    (parent,) = runs(swept.folder)[0]
    assert len(children) == 3
    assert {run.data.tags["mlflow.parentRunId"] for run in children} == {parent.info.run_id}
    assert {run.info.status for run in (parent, *children)} == {"FINISHED"}
    assert parent.data.tags["num_trials"] == "3"
    assert "sharding=ddp,per_block" in parent.data.tags["mlflow.source.name"]
    assert artifacts(swept.folder, parent) == [
        "multirun.yaml", "report.csv", "report.html", "report.md", "results.csv",
        "use_accelerate.yaml", "use_pytorch.py", "use_torchtitan.toml",
    ]  # fmt: skip


def test_parameters_are_named_as_on_the_command_line(children: list[Run]):
    for (sharding, offload), run in zip(TRIALS, children, strict=True):
        given = {"sharding": sharding, "offload": offload, "precision": "fp32", "reshard_after_forward": "always"}
        others = {"model": "vit_tiny", "data": "digits", "data.num_train": "128", "optimizer.lr": "0.001"}
        assert {**given, **others}.items() <= run.data.params.items()


def test_metrics_stand_at_their_epoch(swept: Swept, children: list[Run]):
    for run in children:
        for key in ("train/loss", "val/loss", "val/accuracy", "perf/samples_per_s", "memory/peak_bytes"):
            points = history(swept.folder, run, key)
            assert [step for step, _ in points] == [1, 2], key
        assert {"memory/rank0/peak_bytes", "memory/rank1/peak_bytes", "checkpoint/save_s"} <= run.data.metrics.keys()
        assert history(swept.folder, run, "train/step") == [(1, 4), (2, 8)]
        for key in run.data.metrics:
            assert is_mib_key(key) or declared(key), "what is measured is declared"


def test_the_forecast_stands_beside_what_was_measured(swept: Swept, children: list[Run]):
    rows = results(swept.folder)
    for row, run in zip(rows, children, strict=True):
        assert float(row["forecast/peak_bytes"]) == float(row["memory/peak_bytes"]) > 0
        assert float(row["forecast/error"]) == 0
        assert run.data.metrics["forecast/peak_bytes"] == run.data.metrics["memory/peak_bytes"]
        assert run.data.metrics["forecast/error"] == 0
        assert run.data.metrics["memory/peak_mib"] == run.data.metrics["memory/peak_bytes"] / 2**20
    assert "forecast MiB" in swept.done.stdout


def test_the_images_are_an_input_with_a_digest(children: list[Run]):
    inputs = [run.inputs.dataset_inputs for run in children]
    assert all(len(one) == 1 and one[0].dataset.name == DIGITS for one in inputs)
    digests = {one[0].dataset.digest for one in inputs}
    assert len(digests) == 1 and "" not in digests


def test_tags_state_where_it_came_from(children: list[Run]):
    for run in children:
        tags = run.data.tags
        assert {"host", "device", "version.torch", "version.ray", "version.mlflow"} <= tags.keys()
        assert re.fullmatch(r"[0-9a-f]{40}", tags["mlflow.source.git.commit"])
        assert tags["world_size"] == "2" and tags["status"] == "finished"


def test_artifacts_are_the_composed_config_and_the_model(swept: Swept, children: list[Run]):
    for run in children:
        names = artifacts(swept.folder, run)
        assert {"config/config.yaml", "config/overrides.yaml", "model/model.pt"} <= set(names)


def plain_run(values: dict[str, Any], folder: Path) -> list[dict[str, float]]:
    from fsdp_lab.training import train

    memo = Memo()
    train(from_dict(NightlyConfig, values), folder, memo)
    return memo.reported


def test_the_losses_are_those_of_a_run_without_ray(swept: Swept, children: list[Run], tmp_path: Path):
    values = yaml.safe_load((swept.folder / "out" / "1" / ".hydra" / "config.yaml").read_text())
    plain = run_ranks(2, plain_run, values, tmp_path)[0]
    assert len(plain) == 2
    for key in ("train/loss", "val/loss", "val/accuracy"):
        expected = [metrics[key] for metrics in plain]
        for run in children[1:]:  # offload changes nothing on a CPU, and never a loss
            assert [value for _, value in history(swept.folder, run, key)] == pytest.approx(expected, abs=1e-6)


def test_the_exported_model_predicts_what_the_trial_measured(swept: Swept, children: list[Run]):
    run = children[1]
    for argument in ("file=out/1/model.pt", f"run={run.info.run_id}"):
        done = forked.run(swept.folder, "fsdp_lab.predict", argument, STORE, "out=.")
        assert done.returncode == 0, done.stderr
        accuracy = float(re.findall(r"accuracy ([0-9.]+)", done.stdout)[0])
        assert accuracy == pytest.approx(run.data.metrics["val/accuracy"], abs=1e-4)
        assert (swept.folder / "predictions.png").read_bytes().startswith(b"\x89PNG")
        (swept.folder / "predictions.png").unlink()


@pytest.fixture(scope="module")
def one_fails(tmp_path_factory: pytest.TempPathFactory) -> Swept:
    """2000 is more than the images, which only the reader of the images knows."""
    folder = tmp_path_factory.mktemp("one-fails")
    tiny = [a for a in TINY if not a.startswith(("training.global", "cluster."))]
    alone = ("cluster.num_workers=1", "model=mlp", "forecast.enabled=false")  # side by side, with a worker each
    words = ("training.global_batch_size=32,2000", "training.epochs=1", *alone, "-m")
    return Swept(folder, run_cli(folder, *PLAIN, *tiny, *words, timeout=390))


def test_one_that_fails_takes_no_other_down(one_fails: Swept):
    assert one_fails.done.returncode == 1
    good, bad = results(one_fails.folder)
    assert (good["status"], good["error"]) == ("finished", "")
    assert bad["status"] == "failed"
    assert "2000" in bad["error"] and "\n" not in bad["error"]
    assert bad["error"] in one_fails.done.stdout.replace("\n", " ")


def test_one_that_fails_is_reported_to_mlflow(one_fails: Swept):
    (parent,), (good, bad) = runs(one_fails.folder)
    assert (good.info.status, bad.info.status, parent.info.status) == ("FINISHED", "FAILED", "FAILED")
    assert "2000" in bad.data.tags["error"]


def test_an_error_of_the_users_is_not_tried_again(one_fails: Swept):
    log = (one_fails.folder / "out" / "1" / "logs" / "rank0.log").read_text()
    assert log.count("ConfigError: training.global_batch_size=2000 is more") == 1


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Swept:
    folder = tmp_path_factory.mktemp("single")
    tiny = [a for a in TINY if not a.startswith(("hydra.", "cluster."))]
    words = ("cluster.num_workers=1", "training.max_steps=2")
    return Swept(folder, run_cli(folder, *PLAIN, *tiny, *words, timeout=390))


def test_a_trial_alone_is_a_plain_run(single: Swept):
    assert single.done.returncode == 0, single.done.stderr
    (run,), children = runs(single.folder)
    assert children == [] and run.info.status == "FINISHED"
    assert store(single.folder).get_run(run.info.run_id).data.metrics["train/step"] == 2


def test_a_trial_alone_has_hydras_folder(single: Swept):
    (folder,) = single.folder.glob("outputs/????-??-??/??-??-??")
    assert {file.name for file in (folder / ".hydra").iterdir()} == {"config.yaml", "hydra.yaml", "overrides.yaml"}
    assert (folder / "results.csv").exists() and (folder / "model.pt").exists()
