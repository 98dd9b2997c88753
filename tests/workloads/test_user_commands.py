"""The command line with a user's model, data set and loss, each from a file that imports nothing of fsdp_lab."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from fsdp_lab.tracking.tags import COMMAND_TAG
from tests.conftest import HERE, PLAIN, run_cli
from tests.folders import Store, SweepFolder
from tests.forecast.command import forecast_here
from tests.workloads.user.project import DATA, NET, write_project

INLINE = ("engine=inline", "cluster.num_workers=1", *HERE)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    write_project(tmp_path)
    return tmp_path


def test_a_sweep_of_their_arguments_and_its_resume(project: Path) -> None:
    """It learns; what it varies stands in MLflow and results.csv; a resume after a change of their code says so."""
    option = ("--config-dir", "conf_of_mine", "model=mine", "model.width=8,64", *DATA, "data.noise=0.5")
    steps = ("training.epochs=15", "optimizer.lr=0.03", "forecast.enabled=false")
    done = run_cli(project, *PLAIN, *option, *INLINE, *steps, "-m", timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    with (project / "out" / "results.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    assert [row["model.width"] for row in rows] == ["8", "64"]
    assert all(float(row["val/loss"]) < 0.1 for row in rows), "the sum of three numbers is easily learned"
    theirs = [run.data.params for run in Store(project).trials]
    commands = [run.data.tags[COMMAND_TAG] for run in Store(project).trials]
    assert all(command.startswith("python -m fsdp_lab --config-dir=conf_of_mine") for command in commands)
    assert {each["model.width"] for each in theirs} == {"8", "64"}
    assert {(each["model"], each["model._target_"], each["data.noise"], each["task.loss"]) for each in theirs} == {
        ("mine", "my_project.net.Net", "0.5", "my_project.net.loss")
    }

    SweepFolder(project / "out").trials[1].change(outcome=None)
    refused = run_cli(project, "resume=out").stderr
    assert "add it to the command after resume=...: --config-dir=conf_of_mine" in refused
    resume = ("resume=out", "--config-dir=conf_of_mine")
    again = run_cli(project, *resume)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "trial 1 starts" in again.stdout and "trial 0 starts" not in again.stdout
    with (project / "my_project" / "net.py").open("a") as file:
        file.write("# changed\n")
    assert "the code of fsdp_lab or my_project changed" in run_cli(project, *resume).stderr


def test_a_forecast_of_theirs(project: Path) -> None:
    """One block alone is gathered at a time: the wider of two nets holds more, and DDP most."""
    words = ["-m", NET[0], "model.width=16,64", *DATA, "sharding=ddp,per_block", *PLAIN[1:]]
    done = forecast_here(project, *words, "cluster.num_workers=4", "forecast.folder=f")
    assert done.returncode == 0, done.stderr
    with (project / "f" / "forecast.csv").open() as lines:
        peaks = {(row["sharding"], row["model.width"]): float(row["peak_bytes"]) for row in csv.DictReader(lines)}
    assert peaks["ddp", "64"] > peaks["per_block", "64"] > peaks["per_block", "16"]
    asks = ("model._target_=my_project.net.Asks", "model.width=16", *DATA)
    refused = forecast_here(project, *asks, "cluster.num_workers=1", "forecast.folder=f")
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1
    assert "_local_scalar_dense.default needs one in the forward pass of the model" in refused.stderr


def test_what_a_trial_finds_is_one_message(project: Path) -> None:
    """The batch does not suit the model, or the model raises: one line, which names the user's place."""
    models = "model._target_=my_project.net.Net,my_project.net.Fails"
    batches = "data.collate_fn=null,my_project.data.collate_wrongly"
    without = ("forecast.enabled=false", "training.max_steps=1", "export=false")
    done = run_cli(project, models, *NET[1:], batches, *PLAIN, *INLINE, *without, "-m")
    output = done.stdout + done.stderr
    assert done.returncode == 1 and "3 failed" in output, output
    assert "Traceback" not in output and "UserError" not in output
    failed = {n: [line for line in done.stdout.splitlines() if f"trial {n} failed" in line] for n in (1, 2)}
    (of_batch,), (of_model,) = failed.values()
    assert "the forward pass fails in first (Linear) on a batch of {x: 64x2 float32, y: 64 float" in of_batch
    lines = (project / "my_project" / "net.py").read_text().splitlines()
    place = next(number for number, line in enumerate(lines, 1) if "boom" in line)
    assert of_model.endswith(f"RuntimeError: boom (my_project/net.py:{place}) [traceback: out/2/error.txt]")
    assert "boom" in (project / "out/2/error.txt").read_text()
