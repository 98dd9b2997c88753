"""The command line with a user's model, data set and loss, each from a file that imports nothing of fsdp_lab."""

from __future__ import annotations

import csv
import json
import math
import shutil
from pathlib import Path

import pytest
import yaml

from fsdp_lab.forecast.__main__ import main as forecast
from tests.conftest import LOOKS, STORE, run_cli
from tests.workloads.user.project import write_project

NET = ("model._target_=my_project.net.Net", "model.width=16")
DATA = ("data._target_=my_project.data.Corpus",)
LOSS = ("task.loss=my_project.net.loss",)
THEIRS = (*NET, *DATA, *LOSS)
HERE = ("engine=inline", "cluster.num_workers=1", "hydra.run.dir=out", "hydra.sweep.dir=out", STORE)
ONE_CELL = ("sharding=per_block", "precision=fp32", "offload=none", "reshard_after_forward=always")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    write_project(tmp_path)
    return tmp_path


def last_metrics(folder: Path) -> dict[str, float]:
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])


def params(project: Path) -> list[dict[str, str]]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{project}/mlflow.db")
    runs = client.search_runs([e.experiment_id for e in client.search_experiments()])
    return [run.data.params for run in runs]


def test_a_sweep_of_their_arguments_and_its_resume(project: Path) -> None:
    """It learns; what it varies stands in MLflow and results.csv; a resume after a change of their code says so."""
    option = ("--config-dir", "conf_of_mine", "model=mine", "model.width=8,64", *DATA, "data.noise=0.5", *LOSS)
    done = run_cli(project, *ONE_CELL, *option, *HERE, "training.epochs=30", "optimizer.lr=0.01", "-m", timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 trials: model.width" in done.stdout
    with (project / "out" / "results.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    assert [row["model.width"] for row in rows] == ["8", "64"]
    assert all(float(row["val/loss"]) < 0.1 for row in rows), "the sum of three numbers is easily learned"
    theirs = [each for each in params(project) if "model.width" in each]
    assert {each["model.width"] for each in theirs} == {"8", "64"}
    assert {(each["model"], each["model._target_"], each["data.noise"], each["task.loss"]) for each in theirs} == {
        ("mine", "my_project.net.Net", "0.5", "my_project.net.loss")
    }

    (project / "out" / "1" / "outcome.json").unlink()
    refused = run_cli(project, "resume=out")
    assert refused.returncode == 2
    assert "add it to the command after resume=...: --config-dir=conf_of_mine" in refused.stderr
    resume = ("resume=out", "--config-dir=conf_of_mine")
    again = run_cli(project, *resume)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "trial 1 starts" in again.stdout and "trial 0 starts" not in again.stdout
    file = project / "my_project" / "net.py"
    file.write_text(file.read_text().replace("torch.tanh", "torch.sin"))
    refused = run_cli(project, *resume)
    assert refused.returncode == 2
    assert "your code changed: my_project/net.py" in refused.stderr
    assert run_cli(project, *resume, "resume_anyway=true").returncode == 0


def test_a_search_knows_the_code_of_the_trials_to_come(project: Path) -> None:
    """Of its two models it has tried one. A resume after a change of the other would train another one."""
    shutil.copytree(project / "my_project", project / "other_project")
    models = "model._target_=my_project.net.Net,other_project.net.Net"
    search = ("search=random", "search.num_trials=1", "training.max_steps=1", "export=false", "-m")
    done = run_cli(project, models, "model.width=8", *DATA, *LOSS, *ONE_CELL, *HERE, *search, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    known = json.loads((project / "out" / "sweep.json").read_text())["user_code"]
    assert {"my_project/net.py", "other_project/net.py"} <= set(known)


def test_a_resume_with_another_argument_is_refused(project: Path) -> None:
    assert run_cli(project, *THEIRS, *HERE, "training.max_steps=1", "export=false").returncode == 0
    for word, observed in (
        ("model.depth=3", "model.depth was None and is 3"),
        ("data.noise=0.1", "data.noise was None and is 0.1"),
        ("model.width=17", "model.width was 16 and is 17"),
    ):
        refused = run_cli(project, "resume=out", word)
        assert refused.returncode == 2 and observed in refused.stderr, refused.stderr


@pytest.mark.timeout(600)
def test_their_code_reaches_the_workers_of_ray(project: Path) -> None:
    """What it learns in other shardings is in test_every_workload.py."""
    words = (*THEIRS, *ONE_CELL, *HERE[2:], "cluster.num_workers=2", "training.epochs=2")
    done = run_cli(project, "-m", *words, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "forecast" in done.stdout
    metrics = last_metrics(project / "out" / "0")
    assert metrics["epoch"] == 2 and math.isfinite(metrics["val/loss"])
    forecast_of = json.loads((project / "out" / "0" / "forecast.json").read_text())
    assert forecast_of["forecast/peak_bytes"] == metrics["memory/peak_bytes"]


def test_a_constructor_that_hangs_is_ended_and_named(project: Path) -> None:
    stuck = ("model._target_=my_project.net.Stuck", "model.width=16", *DATA, *LOSS, "forecast.enabled=false")
    limits = ("trial_timeout_s=3", "cluster.wait_timeout_s=60", "cluster.max_failures=0", "cluster.num_workers=1")
    done = run_cli(project, *stuck, *limits, "hydra.run.dir=out", STORE, timeout=250)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "no progress for trial_timeout_s=3 s since building the model began" in done.stdout, done.stdout
    place = f"rank 0 is at {project}/my_project/net.py:"
    assert f"; {place}" in done.stdout.partition("it was ended")[2], "the line on which it hangs"
    assert "trial: building the model has lasted" in done.stdout


def test_what_is_written_down_is_what_was_typed(project: Path) -> None:
    done = run_cli(project, *THEIRS, "--cfg", "job")
    shown = yaml.safe_load(done.stdout)
    assert shown["model"] == {"_target_": "my_project.net.Net", "width": 16}
    assert shown["data"] == {"_target_": "my_project.data.Corpus"}
    assert shown["task"]["loss"] == "my_project.net.loss" and shown["task"]["name"] == "custom"


def test_a_forecast_of_theirs(project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """One block alone is gathered at a time: the wider of two nets holds more, and DDP most."""
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(project)
    words = ["-m", *THEIRS[:1], "model.width=16,64", *DATA, *LOSS, "sharding=ddp,per_block", *ONE_CELL[1:]]
    monkeypatch.setattr("sys.argv", ["forecast", *words, "cluster.num_workers=4", "forecast.folder=f"])
    assert forecast() == 0, capsys.readouterr().err
    with (project / "f" / "forecast.csv").open() as lines:
        peaks = {(row["sharding"], row["model.width"]): float(row["peak_bytes"]) for row in csv.DictReader(lines)}
    assert peaks["ddp", "64"] > peaks["per_block", "64"] > peaks["per_block", "16"]


BATCH = "data.collate_fn=my_project.data.collate_wrongly"
# What is typed -> what the message must say. Only a trial or a forecast can find it.
FOUND_LATER = {
    "loss": ([*NET, *DATA, "task.loss=my_project.net.of_each_item"], "of_each_item is a tensor of 64; it must be the"),
    "batch": ([*THEIRS, BATCH], "the forward pass fails in first (Linear) on a batch of {x: 64x2 float32, y: 64 float"),
}
NO_TEXT = (["task=language", "data=text", "data.root=conf_of_mine"], "data.root=conf_of_mine has no text")
ASKS = ["model._target_=my_project.net.Asks", "model.width=16", *DATA, *LOSS]


@pytest.mark.parametrize(("words", "message"), FOUND_LATER.values(), ids=FOUND_LATER)
def test_what_a_trial_finds_is_one_message(project: Path, words: list[str], message: str) -> None:
    done = run_cli(project, *words, *HERE)
    assert done.returncode == 1
    (line,) = (line for line in (done.stdout + done.stderr).splitlines() if message in line)
    assert "trial failed" in line
    assert "UserError" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        *FOUND_LATER.values(),
        NO_TEXT,
        (ASKS, "_local_scalar_dense.default needs one in the forward pass of the model"),
    ],
    ids=[*FOUND_LATER, "no text", "values"],
)
def test_what_a_forecast_finds_is_one_message(
    project: Path, words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(project)
    monkeypatch.setattr("sys.argv", ["forecast", *words, "cluster.num_workers=1", "forecast.folder=f"])
    assert forecast() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fsdp_lab.forecast: ") and message in line


def test_a_forecast_that_fails_prints_its_reason_and_no_table(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(project)
    fails = ("model._target_=my_project.net.Fails", "model.width=8", *DATA, *LOSS)
    one = (
        "forecast.folder=failed",
        "precision=fp32",
        "offload=none",
        "reshard_after_forward=always",
        "cluster.num_workers=1",
    )
    monkeypatch.setattr("sys.argv", ["forecast", "-m", "sharding=root,per_block", *fails, *one])
    assert forecast() == 1
    shown = capsys.readouterr()
    assert "boom" in shown.err and "forecast peak" not in shown.out and "written" not in shown.out
    assert not list((project / "failed").iterdir())


def test_an_error_of_their_code_is_one_line_that_names_its_place(project: Path) -> None:
    fails = ("model._target_=my_project.net.Fails", "model.width=8", *DATA, *LOSS)
    done = run_cli(project, *fails, *HERE)
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    (line,) = (line for line in done.stdout.splitlines() if "trial failed" in line)
    number = next(
        n for n, text in enumerate((project / "my_project/net.py").read_text().splitlines(), 1) if "boom" in text
    )
    output = f"RuntimeError: boom (my_project/net.py:{number}) [traceback: out/failures/rank0.json]"
    assert line.endswith(output)
    assert "boom" in json.loads((project / "out/failures/rank0.json").read_text())["traceback"]
    assert "boom" in (project / "out/error.txt").read_text()


def test_the_printed_command_tries_mended_code_again(project: Path) -> None:
    failed = run_cli(project, *FOUND_LATER["loss"][0], *HERE, "training.max_steps=1")
    assert "0 of 1 trial has a result, 1 failed" in failed.stdout
    output = "python -m fsdp_lab resume=out resume_failed=true (if your code changed, also resume_anyway=true)"
    assert output in failed.stdout, failed.stdout
    file = project / "my_project" / "net.py"
    file.write_text(file.read_text().replace('- batch["y"]) ** 2', '- batch["y"]).pow(2).mean()'))
    assert run_cli(project, "resume=out", "resume_failed=true").returncode == 2
    mended = run_cli(project, "resume=out", "resume_failed=true", "resume_anyway=true")
    assert mended.returncode == 0 and "1 of 1 trial has a result, after" in mended.stdout, mended.stdout + mended.stderr


def test_a_model_that_cannot_be_forecast_trains(project: Path) -> None:
    done = run_cli(project, *ASKS, *HERE, "training.max_steps=1", "export=false")
    assert done.returncode == 0, done.stdout + done.stderr


# What is typed -> what the message must say. Nothing of Ray is imported for it.
REFUSED = {
    "no module": (["model._target_=my_projct.net.Net"], ["no module my_projct", "Did you mean my_project?"]),
    "unknown argument": (
        ["model._target_=my_project.net.Net", "model.widht=4"],
        ["has no parameter widht", "takes: width, depth."],
    ),
    "key of ours": (["model.num_layer=4"], ["model.num_layer is not a key", "Did you mean model.num_layers?"]),
    "target with a typo": (["model._target=my_project.net.Net"], ["model._target is", "Did you mean model._target_?"]),
    "type of ours": (["model.num_layers=many"], ["model.num_layers=many", "Integer; use a whole number"]),
    "folder": (["--config-dir=nowhere", "model=mine"], ["nowhere", "not found"]),
    "option": (["--config-dir=conf_of_mine", "model=mien"], ["model=mien is not an option", "mine", "vit_tiny"]),
    "no text": (NO_TEXT[0], [NO_TEXT[1], "point it at a folder with .txt, .md, .parquet files"]),
}


@pytest.mark.parametrize("flag", [[], ["-m"]], ids=["trial", "sweep"])
@pytest.mark.parametrize(("words", "expected_message"), REFUSED.values(), ids=REFUSED)
def test_bad_input_is_reported_before_ray_starts(
    project: Path, words: list[str], expected_message: list[str], flag: list[str]
) -> None:
    done = run_cli(project, *words, *ONE_CELL, *flag, list_imports=True, imported=LOOKS, timeout=60)
    *message, imported = done.stderr.splitlines()
    assert done.returncode in (1, 2) and len(message) == 1 and message[0].startswith("fsdp_lab: "), done.stderr
    assert [word for word in expected_message if word not in message[0]] == []
    assert "ray" not in imported and "mlflow" not in imported
    assert not (flag and (project / "outputs").exists())
