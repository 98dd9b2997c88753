"""The pages in `docs/` hold code that runs."""

from __future__ import annotations

import csv
import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_lab.forecast.__main__ import plan_forecasts
from tests import forked
from tests.conftest import ROOT, STORE, run_cli
from tests.pages import all_commands

# Pages whose commands are composed, checked and laid out as a grid, but not run.
COMPOSED = ("quickstart", "concepts", "recipes")
_NOT_COMPOSED = ("resume=", "doctor", "--keys", "--version", "my_project")  # other tests run these

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


@pytest.mark.full
def test_the_script_runs(project: Path) -> None:
    command = [sys.executable, "train.py"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.full
def test_the_sweep_runs(project: Path) -> None:
    done = run_cli(project, *COMMANDS[0], *INLINE, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    with (project / "out" / "results.csv").open() as lines:
        assert [(row["sharding"], row["status"]) for row in csv.DictReader(lines)].count(("ddp", "finished")) == 2


@pytest.mark.full
def test_the_option_runs(project: Path) -> None:
    done = run_cli(project, *COMMANDS[2], *INLINE, "training.max_steps=1")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.full
def test_the_preset_runs(project: Path) -> None:
    done = run_cli(project, *COMMANDS[3], *INLINE, "training.max_steps=1", timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    with (project / "out" / "results.csv").open() as lines:
        collected = [(row["model.width"], row["sharding"], row["status"]) for row in csv.DictReader(lines)]
    assert sorted(collected) == [
        (width, sharding, "finished") for width in ("256", "64") for sharding in ("ddp", "per_block")
    ]
    lines = done.stdout.splitlines()
    command = lines[next(i for i, line in enumerate(lines) if line.startswith("report: ")) - 1]
    assert command.lstrip().removeprefix("to train it: ").startswith("python -m fsdp_lab --config-dir=conf_of_mine ")


@pytest.mark.full
def test_the_forecast_runs(project: Path) -> None:
    done = forked.run(project, "fsdp_lab.forecast", *COMMANDS[1], "forecast.folder=f")
    assert done.returncode == 0, done.stderr
    assert len((project / "f" / "forecast.csv").read_text().splitlines()) == 5


def commands_of(page: str) -> list[tuple[str, list[str]]]:
    """Return the module and the words of each command of ours on a page."""
    words = [command.words for command in all_commands() if command.page == f"docs/{page}.md"]
    ours = [each for each in words if each[:2] == ["python", "-m"] and each[2] in ("fsdp_lab", "fsdp_lab.forecast")]
    return [(each[2], each[3:]) for each in ours]


@pytest.mark.ci
def test_the_words_on_pages_are_known_and_fit_each_other():
    typed = [words for page in COMPOSED for _, words in commands_of(page)]
    typed = [words for words in typed if not any(part in word for part in _NOT_COMPOSED for word in words)]
    assert len(typed) > 10
    assert {" ".join(words): wrong for words in typed if (wrong := refused(words))} == {}


def refused(words: list[str]) -> str:
    """Return why the words of a command make no trial; "" if they do."""
    swept, typed = "-m" in words, [word for word in words if word != "-m"]
    if any(word.startswith("search=") for word in typed):  # an interval is no cell: its ends are
        typed = [word for word in typed if "interval(" not in word]
    try:
        plan, _ = plan_forecasts(typed, multirun=swept)
    except Exception as error:  # noqa: BLE001 - every one is a finding
        return f"{type(error).__name__}: {error}"
    return "" if plan.trials else "no trial"


def test_each_figure_stands_with_the_command_that_prints_its_values():
    spec = importlib.util.spec_from_file_location("figures", ROOT / "docs" / "figures.py")
    assert spec and spec.loader
    figures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(figures)
    shown = [words for _, words in commands_of("concepts")]
    page = (ROOT / "docs" / "concepts.md").read_text()
    for axis in figures.FIGURES:
        assert shlex.split(figures.command(axis))[3:] in shown
        assert f"(figures/{axis}.svg)" in page and (ROOT / "docs" / "figures" / f"{axis}.svg").is_file()


def test_limitations_say_what_the_committed_runs_on_gpus_have_seen():
    """A run's own rows, and those that were forecast again after it."""
    page = " ".join((ROOT / "docs" / "limitations.md").read_text().split())
    for file in (ROOT / "experiments" / "gpu" / "results").glob("*.json"):
        table = json.loads(file.read_text())
        losses = sum("test_a_setting_learns" in row["check"] and row["outcome"] == "passed" for row in table["rows"])
        peaks = sum("peak_bytes" in row["figures"] for row in table["rows"]) + len(table.get("recomputed", ()))
        assert f"{table['device'].removeprefix('NVIDIA ')} with PyTorch {table['torch'][:4]}" in page
        assert f"losses of {losses} settings, {peaks} peaks of memory" in page
