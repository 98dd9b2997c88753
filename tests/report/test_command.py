"""The report of a real sweep: at its end, and again by the command, from its folder and from the store alone."""

from __future__ import annotations

import csv
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from fsdp_lab.takehome import FILES
from tests import forked
from tests.conftest import STORE, run_cli
from tests.sweep.conftest import TINY, artifacts, runs, store

SWEEP = (
    *(o for o in TINY if "num_workers" not in o), "engine=inline", "model=mlp", "forecast.enabled=false",
    "offload=none", "sharding=per_block", "precision=fp32,bf16", "reshard_after_forward=always",
    "optimizer.lr=1e-3,1e-9", "report.loss_tolerance=0.03", "report.others_cpu=1", "-m",
)  # fmt: skip


def report(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return forked.run(cwd, "fsdp_lab.report", *arguments)


def described(folder: Path) -> str:
    """What the description of the sweep's run begins with."""
    return runs(folder)[0][0].data.tags["mlflow.note.content"].splitlines()[0]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with a sweep in which a learning rate of 1e-9 learns nothing, and what the sweep printed."""
    folder = tmp_path_factory.mktemp("swept")
    done = run_cli(folder, *SWEEP)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def test_a_sweep_ends_with_its_report(swept: tuple[Path, str]):
    folder, printed = swept
    rows = list(csv.DictReader((folder / "out/report.csv").open()))
    assert [(row["precision"], row["optimizer.lr"]) for row in rows] == [
        ("fp32", "0.001"), ("fp32", "1e-09"), ("bf16", "0.001"), ("bf16", "1e-09"),
    ]  # fmt: skip
    assert [bool(row["why_not"]) for row in rows] == [False, True, False, True]
    (recommended,) = [row for row in rows if row["recommended"] == "yes"]
    assert recommended["optimizer.lr"] == "0.001"
    sentence = (folder / "out/report.md").read_text().splitlines()[2].strip("*").replace("`", "")
    assert " ".join(sentence.split()) in " ".join(printed.split())
    assert "report: out/report.html" in printed
    assert f"> {recommended['trial']} " in printed
    parent = runs(folder)[0][0]
    assert described(folder) == (folder / "out/report.md").read_text().splitlines()[2].strip("*")
    note = parent.data.tags["mlflow.note.content"]
    assert "Started 20" in note and f"    {parent.data.tags['fsdp_lab.command']}\n" in note
    assert {"report.html", "report.md", "report.csv", *FILES.values()} <= set(artifacts(folder, parent))
    got = store(folder).download_artifacts(parent.info.run_id, "report.html")
    assert Path(got).read_bytes() == (folder / "out/report.html").read_bytes()


def test_the_recommended_command_trains_that_setting(swept: tuple[Path, str]):
    import shlex

    folder, _ = swept
    command = next(line for line in (folder / "out/report.md").read_text().splitlines() if line.startswith("python -m"))
    arguments = shlex.split(command)[3:]
    assert "precision=fp32" in arguments or "precision=bf16" in arguments
    again = run_cli(folder, *arguments, "hydra.run.dir=again", "--cfg", "job")
    assert again.returncode == 0, again.stderr
    assert "lr: 0.001" in again.stdout and "granularity: per_block" in again.stdout


def test_the_setting_can_be_taken_home(swept: tuple[Path, str]):
    folder, _ = swept
    chosen = next(row for row in csv.DictReader((folder / "out/report.csv").open()) if row["recommended"] == "yes")
    for name in FILES.values():
        text = (folder / "out" / name).read_text()
        assert f"precision={chosen['precision']}" in text.splitlines()[0], name
    before = sorted((folder / "out").iterdir())
    printed = report(folder, "sweep=last", "use=pytorch")
    assert printed.returncode == 0, printed.stderr
    assert printed.stdout == (folder / "out/use_pytorch.py").read_text()
    other = report(folder, "sweep=last", "use=pytorch", "trial=3")
    assert "Trial 3: " in other.stdout and "lr=1e-09" in other.stdout and "torch.bfloat16" in other.stdout
    assert sorted((folder / "out").iterdir()) == before, "nothing is written"


def test_the_script_gives_the_loss_that_was_recorded(swept: tuple[Path, str]):
    folder, _ = swept
    chosen = next(row for row in csv.DictReader((folder / "out/report.csv").open()) if row["recommended"] == "yes")
    environment = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        environment["MASTER_PORT"] = str(free.getsockname()[1])
    command = [sys.executable, "out/use_pytorch.py"]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) == pytest.approx(float(chosen["train/loss"]), abs=1e-5)


def test_a_trial_without_a_record_of_its_units_is_reported(swept: tuple[Path, str], tmp_path: Path):
    folder, _ = swept
    for name in ("mlflow.db", "mlartifacts"):
        (shutil.copy if name.endswith("db") else shutil.copytree)(folder / name, tmp_path / name)
    done = report(tmp_path, f"sweep={runs(folder)[0][0].info.run_id}", STORE, "use=accelerate")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "take use_accelerate.yaml from the artifacts of the sweep's MLflow run" in done.stderr


def test_it_is_written_again_from_the_folder_by_any_name_it_has(swept: tuple[Path, str]):
    folder, _ = swept

    def rows() -> list[dict[str, str]]:  # a trial's seconds are its own, those of the driver at the end are a bit more
        return [{**row, "seconds": ""} for row in csv.DictReader((folder / "out/report.csv").open())]

    first = rows()
    for named in ("out", "last"):
        (folder / "out/report.csv").unlink()
        done = report(folder, f"sweep={named}", "tracking.ui=http://127.0.0.1:5999")
        assert done.returncode == 0, done.stderr
        assert rows() == first
        assert "http://127.0.0.1:5999/#/runs/" in (folder / "out/report.html").read_text()
    strict = report(folder, "sweep=out", "out=strict", "report.loss_tolerance=1000")
    assert strict.returncode == 0, strict.stderr
    assert "why_not" in (folder / "strict/report.csv").read_text()
    assert not any(row["why_not"] for row in csv.DictReader((folder / "strict/report.csv").open()))
    assert described(folder) == (folder / "strict/report.md").read_text().splitlines()[2].strip("*")


def test_it_is_written_again_from_the_store_where_the_folder_is_not(swept: tuple[Path, str], tmp_path: Path):
    folder, _ = swept
    for name in ("mlflow.db", "mlartifacts"):
        (shutil.copy if name.endswith("db") else shutil.copytree)(folder / name, tmp_path / name)
    parent = runs(folder)[0][0].info.run_id
    done = report(tmp_path, f"sweep={parent}", STORE)
    assert done.returncode == 0, done.stderr
    here = list(csv.DictReader((tmp_path / "outputs/report" / parent / "report.csv").open()))
    there = list(csv.DictReader((folder / "out/report.csv").open()))
    assert set(here[0]) == set(there[0]), "the same columns"
    for mine, theirs in zip(here, there, strict=True):
        assert (mine["epoch"], mine["step"]) == (theirs["epoch"], theirs["step"])
        assert mine["recommended"] == theirs["recommended"] and mine["precision"] == theirs["precision"]
        assert float(mine["val/loss"]) == float(theirs["val/loss"])
        assert float(mine["memory/peak_bytes"]) == float(theirs["memory/peak_bytes"])
    assert "is within 0.03 of the best" in (tmp_path / "outputs/report" / parent / "report.md").read_text()
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:  # a store that fails after it was opened
        database.execute("DROP TABLE metrics")
        database.commit()
    broken = report(tmp_path, f"sweep={parent}", STORE)
    assert broken.returncode == 2 and STORE in broken.stderr and "Traceback" not in broken.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sweep=0123456789abcdef0123456789abcdef", STORE), "is not in tracking.uri"),
        (("sweep=nowhere",), "sweep=nowhere is not a folder or the id of a run"),
        (("sweep=mlartifacts",), "no sweep was started there"),
        (("sweep=out", "report.loss_tolerance=much"), "report.loss_tolerance=much is not a number"),
        (("sweep=out", "report.speed_tolerance=2"), "report.speed_tolerance=2.0 is outside [0, 1)"),
        (("swep=out",), "swep is not a key. The keys are: sweep,"),
        (("sweep=out", "use=torch"), "use=torch is not an option. Choose one of: pytorch, accelerate, torchtitan."),
        (("sweep=out", "trial=1"), "trial=1 belongs to use=...; add one of: pytorch, accelerate, torchtitan."),
        (("sweep=out", "use=pytorch", "trial=9"), "trial=9 is not in this sweep; use one of: 0, 1, 2, 3."),
        (("sweep=out", "out=/proc/nowhere"), "name another folder with out="),
    ],
)
def test_what_cannot_be_is_reported_in_a_message(swept: tuple[Path, str], arguments: tuple[str, ...], message: str):
    done = report(swept[0], *arguments)
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr


def test_a_child_and_a_sweep_with_nothing_finished_are_reported(swept: tuple[Path, str], tmp_path: Path):
    folder, _ = swept
    parent, child = runs(folder)[0][0].info.run_id, runs(folder)[1][0].info.run_id
    done = report(folder, f"sweep={child}", STORE)
    assert done.returncode == 2 and f"give its parent's id, {parent}" in done.stderr
    shutil.copytree(folder / "out", tmp_path / "out")
    for outcome in (tmp_path / "out").glob("*/outcome.json"):
        outcome.write_text('{"status": "failed", "error": "planted", "seconds": 1.0}')
    done = report(tmp_path, "sweep=out")
    assert done.returncode == 2 and "no trial has finished (4 failed)" in done.stderr
    assert "Traceback" not in done.stderr
