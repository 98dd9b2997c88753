"""The pages in `docs/` hold code that runs."""

from __future__ import annotations

import importlib.util
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_lab.commands.forecast import plan_forecasts
from tests.conftest import ROOT
from tests.pages import all_commands, lay_project

# Pages whose commands are composed, checked and laid out as a grid, but not run.
COMPOSED = ("quickstart", "concepts", "recipes")
_NOT_COMPOSED = ("resume=", "doctor", "--keys", "--version", "my_project")  # other tests run these


@pytest.mark.full
def test_the_script_runs(tmp_path: Path) -> None:
    """That of docs/your-model.md; tests/test_commands.py runs the commands of the page."""
    lay_project(tmp_path)
    command = [sys.executable, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


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
