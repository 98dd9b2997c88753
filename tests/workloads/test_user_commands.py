"""The command line with a user's model, data set and loss, each from a file that imports nothing of fsdp_lab."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tests.conftest import HERE, PLAIN, run_cli
from tests.folders import SweepFolder
from tests.forecast.command import forecast_here
from tests.workloads.user.project import DATA, NET, write_project

INLINE = ("engine=inline", "cluster.num_workers=1", *HERE)
ONE_STEP = ("training.max_steps=1", "export=false")
ASKS = ("model._target_=my_project.net.Asks", "model.width=16", *DATA)
WRONG_BATCH = "data.collate_fn=my_project.data.collate_wrongly"
OF_BATCH = "the forward pass fails in first (Linear) on a batch of {x: 64x2 float32, y: 64 float"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    write_project(tmp_path)
    return tmp_path


def refusal(project: Path, *words: str) -> str:
    """The only line that the command prints."""
    done = run_cli(project, *words)
    assert done.returncode == 2 and done.stderr.startswith("fsdp_lab: ") and done.stderr.count("\n") == 1, done
    return done.stderr


def params(project: Path) -> list[dict[str, str]]:
    client = MlflowClient(tracking_uri=f"sqlite:///{project}/mlflow.db")
    runs = client.search_runs([e.experiment_id for e in client.search_experiments()])
    return [run.data.params for run in runs]


def replace_in_net(project: Path, old: str, new: str) -> None:
    file = project / "my_project" / "net.py"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


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
    theirs = [each for each in params(project) if "model._target_" in each]  # the sweep's own run has the answer
    assert {each["model.width"] for each in theirs} == {"8", "64"}
    assert {(each["model"], each["model._target_"], each["data.noise"], each["task.loss"]) for each in theirs} == {
        ("mine", "my_project.net.Net", "0.5", "my_project.net.loss")
    }

    SweepFolder(project / "out").trials[1].change(outcome=None)
    assert "add it to the command after resume=...: --config-dir=conf_of_mine" in refusal(project, "resume=out")
    resume = ("resume=out", "--config-dir=conf_of_mine")
    again = run_cli(project, *resume)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "trial 1 starts" in again.stdout and "trial 0 starts" not in again.stdout
    replace_in_net(project, "torch.tanh", "torch.sin")
    assert "the code of fsdp_lab or my_project changed" in refusal(project, *resume)


def test_a_model_without_a_forecast_trains_and_keeps_its_arguments(project: Path) -> None:
    done = run_cli(project, *ASKS, *INLINE, *ONE_STEP)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "model.depth was None and is 3" in refusal(project, "resume=out", "model.depth=3")
    assert "model.width was 16 and is 17" in refusal(project, "resume=out", "model.width=17")


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_their_code_reaches_the_workers_of_ray(project: Path) -> None:
    """What it learns in other shardings is in tests/training/test_parity.py."""
    words = (*NET, *PLAIN, *HERE, "cluster.num_workers=2", "training.epochs=2")
    done = run_cli(project, "-m", *words, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    (trial,) = SweepFolder(project / "out").trials
    metrics = trial.epochs[-1]
    assert metrics["epoch"] == 2 and math.isfinite(metrics["val/loss"])
    assert trial.forecast["forecast/peak_bytes"] == metrics["memory/peak_bytes"]


def test_a_forecast_of_theirs(project: Path) -> None:
    """One block alone is gathered at a time: the wider of two nets holds more, and DDP most."""
    words = ["-m", NET[0], "model.width=16,64", *DATA, "sharding=ddp,per_block", *PLAIN[1:]]
    done = forecast_here(project, *words, "cluster.num_workers=4", "forecast.folder=f")
    assert done.returncode == 0, done.stderr
    with (project / "f" / "forecast.csv").open() as lines:
        peaks = {(row["sharding"], row["model.width"]): float(row["peak_bytes"]) for row in csv.DictReader(lines)}
    assert peaks["ddp", "64"] > peaks["per_block", "64"] > peaks["per_block", "16"]


def test_what_a_trial_finds_is_one_message(project: Path) -> None:
    """The batch does not suit the model, or the model raises: one line, which names the user's place."""
    models = "model._target_=my_project.net.Net,my_project.net.Fails"
    batches = f"data.collate_fn=null,{WRONG_BATCH.partition('=')[2]}"
    without = ("forecast.enabled=false", *ONE_STEP)
    done = run_cli(project, models, *NET[1:], batches, *PLAIN, *INLINE, *without, "-m")
    output = done.stdout + done.stderr
    assert done.returncode == 1 and "3 failed" in output, output
    assert "Traceback" not in output and "UserError" not in output
    failed = {n: [line for line in done.stdout.splitlines() if f"trial {n} failed" in line] for n in (1, 2)}
    (of_batch,), (of_model,) = failed.values()
    assert OF_BATCH in of_batch
    lines = (project / "my_project" / "net.py").read_text().splitlines()
    place = next(number for number, line in enumerate(lines, 1) if "boom" in line)
    assert of_model.endswith(f"RuntimeError: boom (my_project/net.py:{place}) [traceback: out/2/error.txt]")
    assert "boom" in (project / "out/2/error.txt").read_text()


def test_the_printed_command_tries_mended_code_again(project: Path) -> None:
    words = (*NET, "task.loss=my_project.net.of_each_item", "training.max_steps=1", "forecast.enabled=false")
    failed = run_cli(project, *words, *INLINE)
    assert failed.returncode == 1 and "UserError" not in failed.stdout + failed.stderr
    assert "of_each_item is a tensor of 64; it must be the" in failed.stdout + failed.stderr
    output = "python -m fsdp_lab resume=out resume_failed=true (if your code changed, also resume_anyway=true)"
    assert output in failed.stdout, failed.stdout
    replace_in_net(project, '- batch["y"]) ** 2', '- batch["y"]).pow(2).mean()')
    assert "my_project changed" in refusal(project, "resume=out", "resume_failed=true")
    mended = run_cli(project, "resume=out", "resume_failed=true", "resume_anyway=true")
    assert mended.returncode == 0 and "1 of 1 trial has a result, after" in mended.stdout, mended.stdout + mended.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [((*NET, WRONG_BATCH), OF_BATCH), (ASKS, "_local_scalar_dense.default needs one in the forward pass of the model")],
    ids=["batch", "values"],
)
def test_what_a_forecast_finds_is_one_message(project: Path, words: tuple[str, ...], message: str) -> None:
    done = forecast_here(project, *words, "cluster.num_workers=1", "forecast.folder=f")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("fsdp_lab.forecast: ") and message in line
