"""For the pure tests Hydra's compose API; for the others real runs. What they left: tests/folders.py."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from mlflow.entities import Run

from fsdp_lab.config import conf_dir
from fsdp_lab.config.compose import Trial, cell_trial, register_schema
from tests.conftest import STORE, command_line
from tests.folders import Store, SweepFolder
from tests.processes import descendants
from tests.servers import lay_store


@pytest.fixture(scope="module")
def parser() -> Iterator[OverridesParser]:
    """Hydra's own parser, with the config groups of conf/ known to it."""
    register_schema()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        yield OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())


@pytest.fixture(scope="module")
def composed(parser: OverridesParser) -> Callable[[tuple[str, ...]], Trial]:
    """Each cell as trial 0, composed once for all tests of a module."""
    loader = GlobalHydra.instance().config_loader()
    master = loader.load_configuration("config", [], RunMode.MULTIRUN)
    return cache(lambda words: cell_trial(loader.load_sweep_config(master, list(words)), words, 0, Path()))


@pytest.fixture
def compose_trial(
    composed: Callable[[tuple[str, ...]], Trial], tmp_path: Path
) -> Callable[[Sequence[str], int], Trial]:
    """The trial of a cell, in the test's own folder."""
    return lambda words, number: replace(composed(tuple(words)), index=number, folder=tmp_path / str(number))


@pytest.fixture
def no_gpus(monkeypatch: pytest.MonkeyPatch):
    """A planted executor needs no Ray, which would count them."""
    monkeypatch.setattr("fsdp_lab.engine.resources.num_gpus", lambda: 0)


# What runs a command that kills itself, see there.
KILLED = (Path(__file__).parents[1] / "killed.py").read_text()


def runs(folder: Path) -> tuple[list[Run], list[Run]]:
    """`(parents and single trials, children in the order of their folders)`."""
    read = Store(folder)
    return read.parents, read.trials


def results(folder: Path) -> list[dict[str, str]]:
    return SweepFolder(folder / "out").rows


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in memory where there is some: a database on a disk waits for it at every write."""
    shared = Path("/dev/shm")
    in_memory = shared.is_dir() and shutil.disk_usage(shared).free > 2**30
    folder = Path(tempfile.mkdtemp(prefix="fsdp_lab-", dir=shared if in_memory else tmp_path_factory.getbasetemp()))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@contextmanager
def started(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A command line that runs on its own, as the leader of a process group like in a terminal; ended in the end."""
    if STORE in arguments:
        lay_store(folder)
    process = subprocess.Popen(
        command_line(*arguments), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    family: list[psutil.Process] = []
    try:
        yield process
    finally:
        if process.poll() is None:
            family = descendants(process.pid)
            process.kill()
        for child in family:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        process.communicate()


def wait_for(
    condition: Callable[[], Any],
    process: subprocess.Popen[Any],
    seconds: float = 400,
    explain: Callable[[], object] | None = None,
) -> Any:
    """What the condition gives, as soon as it is something; `explain` gives what a process that ended has printed."""
    end = time.monotonic() + seconds
    while not (result := condition()):
        assert process.poll() is None, f"it ended with {process.returncode}: {(explain or process.communicate)()}"
        assert time.monotonic() < end, f"nothing within {seconds} s: {explain() if explain else ''}"
        time.sleep(0.05)
    return result


def has_trained_an_epoch(trial: Path) -> bool:
    file = trial / "metrics.jsonl"
    return file.exists() and "\n" in file.read_text()
