"""A user's project in a folder of its own: `my_project/`, and an option of theirs."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fsdp_lab.config.target import import_object

HERE = "tests.workloads.user.my_project"  # the same, for tests that run in this repository
DATA = ("data._target_=my_project.data.Corpus", "task.loss=my_project.net.loss")
NET = ("model._target_=my_project.net.Net", "model.width=16", *DATA)
FAILS = ("model._target_=my_project.net.Fails", "model.width=16", *DATA)


def write_project(folder: Path) -> None:
    """Copy `my_project/` into a folder, and write the option `model=mine` into `conf_of_mine/`."""
    ignored = shutil.ignore_patterns("__pyc*")
    shutil.copytree(Path(__file__).parent / "my_project", folder / "my_project", ignore=ignored)
    option = folder / "conf_of_mine" / "model" / "mine.yaml"
    option.parent.mkdir(parents=True)
    option.write_text("_target_: my_project.net.Net\nwidth: 12\n")


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Stand in a folder whose `my_project` is imported inside, and by nobody before or after."""
    with pytest.MonkeyPatch.context() as patch:
        forget()
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        try:
            yield
        finally:
            forget()


def forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_project"]:
        del sys.modules[name]
    import_object.cache_clear()
