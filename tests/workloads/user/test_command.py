"""The command line with a user's model, data set and loss, each from a file that imports nothing of fsdp_lab."""

from __future__ import annotations

import csv
import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from fsdp_lab.commands.main import main
from tests.conftest import PLAIN, STORE, run_cli, status_of
from tests.folders import SweepFolder
from tests.forecast.command import forecast_here
from tests.workloads.user.project import importable, write_project

NET = ("model._target_=my_project.net.Net", "model.width=16")
DATA = ("data._target_=my_project.data.Corpus",)
LOSS = ("task.loss=my_project.net.loss",)
THEIRS = (*NET, *DATA, *LOSS)
FAILS = ("model._target_=my_project.net.Fails", "model.width=8", *DATA, *LOSS)
ASKS = ("model._target_=my_project.net.Asks", "model.width=16", *DATA, *LOSS)
HERE = ("engine=inline", "cluster.num_workers=1", "hydra.run.dir=out", "hydra.sweep.dir=out", STORE)
ONE_STEP = ("training.max_steps=1", "export=false")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    write_project(tmp_path)
    return tmp_path


@pytest.fixture
def refusal(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., str]]:
    """`refusal(*words)`: the only line that the command prints, in this process; it may not import Ray or MLflow."""

    def message(*words: str) -> str:
        capsys.readouterr()
        with monkeypatch.context() as patch:
            for name in ("ray", "mlflow"):
                patch.setitem(sys.modules, name, None)
            status = status_of(main, list(words), patch)
        error = capsys.readouterr().err
        assert status == 2 and error.startswith("fsdp_lab: ") and error.count("\n") == 1, (words, status, error)
        return error

    with importable(project):
        yield message


def last_metrics(folder: Path) -> dict[str, float]:
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])


def params(project: Path) -> list[dict[str, str]]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{project}/mlflow.db")
    runs = client.search_runs([e.experiment_id for e in client.search_experiments()])
    return [run.data.params for run in runs]


def replace_in_net(project: Path, old: str, new: str) -> None:
    file = project / "my_project" / "net.py"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def test_a_sweep_of_their_arguments_and_its_resume(project: Path, refusal: Callable[..., str]) -> None:
    """It learns; what it varies stands in MLflow and results.csv; a resume after a change of their code says so."""
    option = ("--config-dir", "conf_of_mine", "model=mine", "model.width=8,64", *DATA, "data.noise=0.5", *LOSS)
    done = run_cli(project, *PLAIN, *option, *HERE, "training.epochs=15", "optimizer.lr=0.03", "-m", timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 trials: model.width" in done.stdout
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
    assert "add it to the command after resume=...: --config-dir=conf_of_mine" in refusal("resume=out")
    resume = ("resume=out", "--config-dir=conf_of_mine")
    again = run_cli(project, *resume)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "trial 1 starts" in again.stdout and "trial 0 starts" not in again.stdout
    replace_in_net(project, "torch.tanh", "torch.sin")
    assert "the code of fsdp_lab or my_project changed" in refusal(*resume)


@pytest.mark.ci
def test_a_sweep_of_an_own_optimizers_arguments(project: Path, refusal: Callable[..., str]) -> None:
    shutil.copy(Path(__file__).with_name("optim.py"), project / "their_optim.py")
    own = ("optimizer._target_=their_optim.Lion", "optimizer.lr=0.01")
    words = (*NET, *DATA, *LOSS, *own, "optimizer.betas=[0.8,0.9],[0.9,0.99]", *PLAIN, *HERE, "training.epochs=4")
    assert "optimizer.beta=0.8: their_optim.Lion has no parameter beta. " in refusal(
        *THEIRS, *own, "optimizer.beta=0.8"
    )
    done = run_cli(project, *words, "-m", timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    with (project / "out" / "results.csv").open() as lines:
        losses = {row["optimizer.betas"]: float(row["val/loss"]) for row in csv.DictReader(lines)}
    assert losses.keys() == {"[0.8,0.9]", "[0.9,0.99]"} and max(losses.values()) < 1 and len({*losses.values()}) == 2


@pytest.mark.ci
def test_a_search_knows_the_code_of_the_trials_to_come(project: Path) -> None:
    """Of its two models it has tried one. A resume after a change of the other would train another one."""
    shutil.copytree(project / "my_project", project / "other_project")
    models = "model._target_=my_project.net.Net,other_project.net.Net"
    search = ("search=random", "search.num_trials=1", *ONE_STEP, "-m")
    done = run_cli(project, models, "model.width=8", *DATA, *LOSS, *PLAIN, *HERE, *search, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    known = json.loads((project / "out" / "sweep.json").read_text())["user_packages"]
    assert known == ["my_project", "other_project"]


def test_a_model_that_cannot_be_forecast_trains_and_resumes_with_no_other_argument(
    project: Path, refusal: Callable[..., str]
) -> None:
    done = run_cli(project, *ASKS, *HERE, *ONE_STEP)
    assert done.returncode == 0, done.stdout + done.stderr
    for word, observed in (
        ("model.depth=3", "model.depth was None and is 3"),
        ("data.noise=0.1", "data.noise was None and is 0.1"),
        ("model.width=17", "model.width was 16 and is 17"),
    ):
        assert observed in refusal("resume=out", word)


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_their_code_reaches_the_workers_of_ray(project: Path) -> None:
    """What it learns in other shardings is in tests/training/test_parity.py."""
    words = (*THEIRS, *PLAIN, *HERE[2:], "cluster.num_workers=2", "training.epochs=2")
    done = run_cli(project, "-m", *words, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "forecast" in done.stdout
    metrics = last_metrics(project / "out" / "0")
    assert metrics["epoch"] == 2 and math.isfinite(metrics["val/loss"])
    forecast_of = SweepFolder(project / "out").trials[0].forecast
    assert forecast_of["forecast/peak_bytes"] == metrics["memory/peak_bytes"]


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_constructor_that_hangs_is_ended_and_named(project: Path) -> None:
    stuck = ("model._target_=my_project.net.Stuck", "model.width=16", *DATA, *LOSS, "forecast.enabled=false")
    limits = ("trial_timeout_s=3", "cluster.wait_timeout_s=60", "cluster.max_failures=0", "cluster.num_workers=1")
    done = run_cli(project, *stuck, *limits, "hydra.run.dir=out", STORE, timeout=400)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "no progress for trial_timeout_s=3 s since building the model began" in done.stdout, done.stdout
    place = f"rank 0 is at {project}/my_project/net.py:"
    assert f"; {place}" in done.stdout.partition("it was ended")[2], "the line on which it hangs"
    assert "trial: building the model has lasted" in done.stdout


def test_what_is_written_down_is_what_was_typed(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with importable(project):
        assert status_of(main, [*THEIRS, "--cfg", "job"], monkeypatch) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["model"] == {"_target_": "my_project.net.Net", "width": 16}
    assert shown["data"] == {"_target_": "my_project.data.Corpus"}
    assert shown["task"]["loss"] == "my_project.net.loss" and shown["task"]["name"] == "custom"


def test_a_forecast_of_theirs(project: Path) -> None:
    """One block alone is gathered at a time: the wider of two nets holds more, and DDP most."""
    words = ["-m", *THEIRS[:1], "model.width=16,64", *DATA, *LOSS, "sharding=ddp,per_block", *PLAIN[1:]]
    done = forecast_here(project, *words, "cluster.num_workers=4", "forecast.folder=f")
    assert done.returncode == 0, done.stderr
    with (project / "f" / "forecast.csv").open() as lines:
        peaks = {(row["sharding"], row["model.width"]): float(row["peak_bytes"]) for row in csv.DictReader(lines)}
    assert peaks["ddp", "64"] > peaks["per_block", "64"] > peaks["per_block", "16"]


# What is typed, and what the message must say. Only a trial or a forecast can find it.
WRONG_LOSS = (*NET, *DATA, "task.loss=my_project.net.of_each_item")
OF_LOSS = "of_each_item is a tensor of 64; it must be the"
WRONG_BATCH = "data.collate_fn=my_project.data.collate_wrongly"
OF_BATCH = "the forward pass fails in first (Linear) on a batch of {x: 64x2 float32, y: 64 float"
NO_FILES = ("data=fashion_mnist", "data.download=false", "data.root=conf_of_mine")
OF_FILES = "data.root=conf_of_mine: "
OF_VALUES = "_local_scalar_dense.default needs one in the forward pass of the model"


def test_what_a_trial_finds_is_one_message(project: Path) -> None:
    """The batch does not suit the model, or the model raises: one line, which names the user's place."""
    models = "model._target_=my_project.net.Net,my_project.net.Fails"
    batches = f"data.collate_fn=null,{WRONG_BATCH.partition('=')[2]}"
    done = run_cli(project, models, "model.width=16", *DATA, *LOSS, batches, *PLAIN, *HERE, *ONE_STEP, "-m")
    output = done.stdout + done.stderr
    assert done.returncode == 1 and "3 failed" in output, output
    assert "Traceback" not in output and "UserError" not in output
    failed = {n: [line for line in done.stdout.splitlines() if f"trial {n} failed" in line] for n in (1, 2)}
    (of_batch,), (of_model,) = failed.values()
    assert OF_BATCH in of_batch
    lines = (project / "my_project" / "net.py").read_text().splitlines()
    place = next(number for number, line in enumerate(lines, 1) if "boom" in line)
    folder = "out/2"
    assert of_model.endswith(f"RuntimeError: boom (my_project/net.py:{place}) [traceback: {folder}/error.txt]")
    assert "boom" in (project / folder / "error.txt").read_text()


def test_the_printed_command_tries_mended_code_again(project: Path, refusal: Callable[..., str]) -> None:
    failed = run_cli(project, *WRONG_LOSS, *HERE, "training.max_steps=1")
    assert failed.returncode == 1
    (line,) = (line for line in (failed.stdout + failed.stderr).splitlines() if OF_LOSS in line)
    assert "trial failed" in line and "UserError" not in failed.stdout + failed.stderr
    assert "0 of 1 trial has a result, 1 failed" in failed.stdout
    output = "python -m fsdp_lab resume=out resume_failed=true (if your code changed, also resume_anyway=true)"
    assert output in failed.stdout, failed.stdout
    replace_in_net(project, '- batch["y"]) ** 2', '- batch["y"]).pow(2).mean()')
    assert "my_project changed" in refusal("resume=out", "resume_failed=true")
    mended = run_cli(project, "resume=out", "resume_failed=true", "resume_anyway=true")
    assert mended.returncode == 0 and "1 of 1 trial has a result, after" in mended.stdout, mended.stdout + mended.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [(WRONG_LOSS, OF_LOSS), ((*THEIRS, WRONG_BATCH), OF_BATCH), (NO_FILES, OF_FILES), (ASKS, OF_VALUES)],
    ids=["loss", "batch", "no files", "values"],
)
def test_what_a_forecast_finds_is_one_message(project: Path, words: tuple[str, ...], message: str) -> None:
    done = forecast_here(project, *words, "cluster.num_workers=1", "forecast.folder=f")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("fsdp_lab.forecast: ") and message in line


def test_a_forecast_that_fails_prints_its_reason_and_no_table(project: Path) -> None:
    words = ("-m", "sharding=root,per_block", *FAILS, *PLAIN[1:], "cluster.num_workers=1")
    done = forecast_here(project, *words, "forecast.folder=failed")
    assert done.returncode == 1
    assert "boom" in done.stderr and "forecast peak" not in done.stdout and "written" not in done.stdout
    assert not list((project / "failed").iterdir())
