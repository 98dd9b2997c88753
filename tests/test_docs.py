"""The pages in `docs/` hold code that runs."""

from __future__ import annotations

import csv
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.conftest import ROOT, STORE, run_cli

PAGE = (ROOT / "docs" / "your-model.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [shlex.split(block.replace("\\\n", " "))[3:] for language, block in BLOCKS if language == "sh"]
INLINE = ("engine=inline", "cluster.num_workers=1", "hydra.run.dir=out", "hydra.sweep.dir=out", STORE)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The files of the page, where it says."""
    for language, block in BLOCKS:
        if language in ("python", "yaml"):
            file = tmp_path / next(line for line in block.splitlines() if not line.startswith("# @")).removeprefix("# ")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block)
    return tmp_path


def test_the_script_runs(project: Path) -> None:
    command = [sys.executable, "train.py"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_the_sweep_runs(project: Path) -> None:
    done = run_cli(project, *COMMANDS[0], *INLINE, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    with (project / "out" / "results.csv").open() as lines:
        assert [(row["sharding"], row["status"]) for row in csv.DictReader(lines)].count(("ddp", "finished")) == 2


def test_the_option_runs(project: Path) -> None:
    done = run_cli(project, *COMMANDS[2], *INLINE, "training.max_steps=1")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_preset_runs(project: Path) -> None:
    done = run_cli(project, *COMMANDS[3], *INLINE, "training.max_steps=1", timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    with (project / "out" / "results.csv").open() as lines:
        found = [(row["model.width"], row["sharding"], row["status"]) for row in csv.DictReader(lines)]
    assert sorted(found) == [
        (width, sharding, "finished") for width in ("256", "64") for sharding in ("ddp", "per_block")
    ]
    assert "--config-dir=conf_of_mine" in done.stdout.splitlines()[-2]


@pytest.mark.parametrize(
    ("file", "content", "words", "told"),
    [
        ("task/tab.yaml", "loss: a.b\n\tunit: samples\n", ["task=tab"], "conf_of_mine/task/tab.yaml:2 is no YAML: "),
        ("experiment/no.yaml", "defaults:\n  - override /model: mine\n", ["experiment=no"], "`# @package _global_`"),
        (
            "experiment/no.yaml",
            "# @package _global_\nmodel:\n  _target_: my_project.net.Net\n  width: 4\n",
            ["experiment=no"],
            "in a preset by `override /model: custom` in its defaults",
        ),
    ],
)
def test_what_the_options_lack_is_one_line(project: Path, file: str, content: str, words: list[str], told: str) -> None:
    path = project / "conf_of_mine" / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    done = run_cli(project, "--config-dir=conf_of_mine", *words)
    (line,) = done.stderr.splitlines()
    assert done.returncode in (1, 2) and line.startswith("fsdp_lab: ") and told in line


def test_the_forecast_runs(project: Path) -> None:
    done = forked.run(project, "fsdp_lab.forecast", *COMMANDS[1], "forecast.folder=f")
    assert done.returncode == 0, done.stderr
    assert len((project / "f" / "forecast.csv").read_text().splitlines()) == 5
