"""The report of a real sweep: at its end, and again by the command, from its folder."""

from __future__ import annotations

import html
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from fsdp_lab.commands.report import main
from tests import forked, trained
from tests.conftest import HERE, run_cli
from tests.folders import Store, page_rows
from tests.forecast.command import forecast_here

pytestmark = pytest.mark.ci


def report(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return forked.run(cwd, "fsdp_lab.report", *arguments)


def described(folder: Path) -> str:
    """What the description of the sweep's run begins with."""
    return Store(folder).parents[0].data.tags["mlflow.note.content"].splitlines()[0]


def sentence_of(page: Path) -> str:
    """The recommendation on a page, with its names in backticks as in MLflow's note."""
    text = re.sub("</?code>", "`", page.read_text().partition('<div id="answer">')[2].partition("</div>")[0])
    return html.unescape(text)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a sweep in which a learning rate of 1e-9 learned nothing."""
    return trained.copy_trained(tmp_path_factory.mktemp("swept"))


def test_a_sweep_ends_with_its_report(folder: Path):
    page = folder / "out/report.html"
    printed, rows = " ".join(trained.printed().split()), page_rows(page)
    assert [(row["precision"], row["optimizer.lr"]) for row in rows] == [
        ("fp32", "0.001"), ("fp32", "1e-09"), ("bf16", "0.001"), ("bf16", "1e-09"),
    ]  # fmt: skip
    (recommended,) = [row for row in rows if row["recommended"] == "yes"]
    assert recommended["optimizer.lr"] == "0.001" and f"> {recommended['trial']} " in printed
    assert sentence_of(page).replace("`", "") in printed and "report: out/report.html" in printed
    command = html.unescape(page.read_text().partition('<pre id="command">')[2].partition("</pre>")[0])
    again = run_cli(folder, *shlex.split(command)[3:], "hydra.run.dir=again", "--cfg", "job")
    assert again.returncode == 0 and "lr: 0.001" in again.stdout and "granularity: per_block" in again.stdout
    store = Store(folder)
    (parent,) = store.parents
    assert described(folder) == sentence_of(page) and printed.endswith(parent.info.run_id)
    assert {"report.html", "results.csv", "use_pytorch.py"} <= set(store.artifacts(parent))
    got = Path(store.client.download_artifacts(parent.info.run_id, "report.html"))
    assert got.read_text() == page.read_text()


@pytest.mark.documents(
    "python -m fsdp_lab.report sweep=last use=pytorch", "python -m fsdp_lab.report sweep=last use=accelerate"
)
def test_the_setting_can_be_taken_home(folder: Path):
    chosen = next(row for row in page_rows(folder / "out/report.html") if row["recommended"] == "yes")
    text, before = (folder / "out/use_pytorch.py").read_text(), sorted((folder / "out").iterdir())
    assert f"precision={chosen['precision']}" in text.splitlines()[0]
    assert report(folder, "sweep=last", "use=pytorch").stdout == text
    words = [word for word in trained.SWEEP if word not in ("-m", *HERE, *trained.AXES)]
    cell = ("precision=bf16", "optimizer.lr=0.001", "cluster.num_workers=1", "engine=ray")
    forecast = forecast_here(folder, *words, *cell, "use=pytorch")
    trial = report(folder, "sweep=last", "use=pytorch", "trial=2")
    of_forecast, of_trial = (done.stdout.partition("On each of the")[2] for done in (forecast, trial))
    assert of_forecast == of_trial != ""
    other = report(folder, "sweep=last", "use=pytorch", "trial=3")
    assert "Trial 3: " in other.stdout and "lr=1e-09" in other.stdout and "torch.bfloat16" in other.stdout
    file = report(folder, "sweep=last", "use=accelerate", "trial=3").stdout
    written = yaml.safe_load(file)
    assert "Trial 3: " in file and "optimizer.lr=1e-09" in file and written["mixed_precision"] == "bf16"
    assert written["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"] == "MlpBlock"
    assert sorted((folder / "out").iterdir()) == before, "nothing is written"


@pytest.mark.documents("python -m fsdp_lab.report sweep=last")
def test_it_is_written_again_from_the_folder_by_any_name_it_has(folder: Path):
    page = folder / "out/report.html"
    first = page_rows(page)
    for named in ("out", "last"):
        page.unlink()
        done = report(folder, f"sweep={named}", "tracking.ui=http://127.0.0.1:5999")
        assert done.returncode == 0, done.stderr
        assert [{**row, "trial": ""} for row in page_rows(page)] == [{**row, "trial": ""} for row in first]
        assert "http://127.0.0.1:5999/#/runs/" in page.read_text()
    strict = report(folder, "sweep=out", "out=strict", "report.loss_tolerance=1000", "report.speed_tolerance=0.4")
    assert strict.returncode == 0, strict.stderr
    of_strict = (folder / "strict/report.html").read_text()
    assert "val/loss too high" not in of_strict and "Settings within 40 % of the fastest" in of_strict
    assert described(folder) == sentence_of(folder / "strict/report.html")


def test_what_cannot_be_is_reported_in_a_message(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """In this process: the command's own `main`."""
    monkeypatch.chdir(folder)
    for words, message in (
        ("sweep=mlartifacts", "no sweep was started there"),
        ("sweep=out trial=1", "trial=1 requires use=pytorch."),
        ("sweep=out use=pytorch trial=9", "trial=9 is not in this sweep; use one of: 0, 1, 2, 3."),
        ("sweep=out out=/proc/nowhere", "name another folder with out="),
    ):
        monkeypatch.setattr("sys.argv", ["report", *words.split()])
        assert main() == 2 and message in capsys.readouterr().err
