"""A Python without the dependencies: each command says what to type."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

COMMANDS = ["fsdp_lab", "fsdp_lab.forecast", "fsdp_lab.report", "fsdp_lab.nightly", "fsdp_lab.predict"]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "fsdp_lab", tmp_path / "fsdp_lab", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def message(checkout: Path, command: str) -> str:
    """What a Python that finds the standard library alone says."""
    start = [sys.executable, "-S", "-B", "-m", command, "sharding=root"]
    done = subprocess.run(start, cwd=checkout, env={}, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"fsdp_lab: {sys.executable} does not have torch, hydra, omegaconf, ray, mlflow")
    return line


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_says_what_is_missing_and_what_to_type(checkout: Path, command: str):
    (checkout / "Makefile").touch()
    assert f"run `make -C {checkout} sweep`" in message(checkout, command)


def test_an_environment_beside_it_is_named(checkout: Path):
    python = checkout / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    assert message(checkout, "fsdp_lab").endswith(f"use {python} instead.")


def test_without_a_checkout_it_is_a_matter_of_pip(checkout: Path):
    assert "-m pip install" in message(checkout, "fsdp_lab")
