"""A user's project in a folder of its own: `my_project/`, and an option of theirs."""

from __future__ import annotations

import shutil
from pathlib import Path

HERE = "tests.workloads.user.my_project"  # the same, for tests that run in this repository


def write_project(folder: Path) -> None:
    """Copy `my_project/` into a folder, and write the option `model=mine` into `conf_of_mine/`."""
    shutil.copytree(
        Path(__file__).parent / "my_project", folder / "my_project", ignore=shutil.ignore_patterns("__pyc*")
    )
    option = folder / "conf_of_mine" / "model" / "mine.yaml"
    option.parent.mkdir(parents=True)
    option.write_text("_target_: my_project.net.Net\nwidth: 12\n")
