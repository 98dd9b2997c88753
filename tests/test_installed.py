"""A Python without the dependencies: each command says what to type."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT

COMMANDS = ["fsdp_lab", "fsdp_lab.forecast", "fsdp_lab.report", "fsdp_lab.nightly", "fsdp_lab.predict"]


def message(checkout: Path, command: str) -> str:
    """What a Python that finds the standard library alone says."""
    start = [sys.executable, "-S", "-B", "-m", command, "sharding=root"]
    done = subprocess.run(start, cwd=checkout, env={}, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"fsdp_lab: {sys.executable} does not have torch, hydra, omegaconf, ray, mlflow")
    return line


def test_each_command_says_what_is_missing_and_what_to_type(tmp_path: Path):
    shutil.copytree(ROOT / "fsdp_lab", tmp_path / "fsdp_lab", ignore=shutil.ignore_patterns("__pycache__"))
    assert "-m pip install" in message(tmp_path, "fsdp_lab"), "without a checkout it is a matter of pip"
    (tmp_path / "Makefile").touch()
    for command in COMMANDS:
        assert f"run `make -C {tmp_path} sweep`" in message(tmp_path, command)
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    assert message(tmp_path, "fsdp_lab").endswith(f"use {python} instead."), "an environment beside it is named"
