"""For the pure tests Hydra's compose API; for the others real runs. What they left: tests/folders.py."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
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
from fsdp_lab.sweep.grid import Cells
from tests.conftest import PLAIN, SIZES, STORE, command_line
from tests.folders import Store, SweepFolder
from tests.processes import called, descendants, kill, marked
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
    cells = Cells(parser, lambda words: loader.load_sweep_config(master, list(words)))
    return cache(lambda words: cell_trial(cells.config(words), words, 0, Path()))


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


def runs(folder: Path) -> tuple[list[Run], list[Run]]:
    """`(parents and single trials, children in the order of their folders)`."""
    read = Store(folder)
    return read.parents, read.trials


def results(folder: Path) -> list[dict[str, str]]:
    return SweepFolder(folder / "out").rows


@contextmanager
def started(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A command line that runs on its own, as the leader of a process group like in a terminal; ended in the end."""
    if STORE in arguments:
        lay_store(folder)
    process = subprocess.Popen(
        command_line(*arguments), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            kill([psutil.Process(process.pid), *descendants(process.pid)])
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


def train_alone(values: dict[str, Any], folder: Path) -> list[dict[str, float]]:
    """On each rank: what a configuration reports without the platform, started in a folder that has its model."""
    from fsdp_lab.config import NightlyConfig, from_dict
    from fsdp_lab.training.train import train
    from tests.ranks import Memo

    os.chdir(folder)
    sys.path.insert(0, str(folder))
    memo = Memo()
    train(from_dict(NightlyConfig, values), folder / "alone", memo)
    return memo.reported


_LIMIT_S = 600  # for a state to be reached, on the slowest machine: beyond it something hangs
_MARK = "FSDP_LAB_GATED"  # in the environment of the sweep's processes


class GatedSweep:
    """A sweep of trials that begin an epoch only when a test lets them: states that it can wait for, and kill in.

    Args:
        folder: in which it is started, and again after its driver has ended; the sweep is `out` in it.
        temporary: for Ray's files; short, since the paths of its sockets have to be.
    """

    TRIAL = ("model._target_=fates.Fate", "model.fate=waits", *SIZES, *PLAIN)

    def __init__(self, folder: Path, temporary: Path) -> None:
        self.folder, self.temporary, self.command = folder, temporary, command_line()
        self.sweep = SweepFolder(folder / "out")
        for name in ("at", "go"):
            (folder / name).mkdir()
        shutil.copy(Path(__file__).with_name("fates.py"), folder)
        lay_store(folder)

    def start(self, *words: str) -> None:
        environment = {**os.environ, _MARK: str(self.folder), "RAY_TMPDIR": str(self.temporary)}
        with (self.folder / "log").open("ab") as log:
            self.driver = subprocess.Popen(
                [*self.command, *words], cwd=self.folder, env=environment, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def start_two_trials(self, *words: str) -> None:
        common = ("hydra.sweep.dir=out", "forecast.enabled=false")
        self.start("-m", *self.TRIAL, "model.mark=0,1", *common, *words)

    def rank(self, trial: int, epoch: int, rank: int = 0) -> psutil.Process:
        """Wait until a trial has begun an epoch, with all epochs before in its folder; the process of a rank."""
        at = self.folder / "at" / f"{trial}.{epoch}.{rank}"

        def begun() -> psutil.Process | None:
            text = at.read_text() if at.exists() else ""
            before = [number for number, *_ in self.sweep.trials[trial].losses]
            with suppress(psutil.NoSuchProcess):
                return psutil.Process(int(text)) if text.endswith("\n") and before == [*range(1, epoch)] else None
            return None

        process: psutil.Process = wait_for(begun, self.driver, _LIMIT_S, self.log)
        return process

    def let_go(self, trial: int, *epochs: int) -> None:
        for epoch in epochs:
            (self.folder / "go" / f"{trial}.{epoch}").touch()

    def kill(self, word: str) -> None:
        """Kill the processes below the driver with that word in their command line, of which there has to be one."""
        victims = called(word, self.driver.pid)
        assert victims, f"there is no {word} to kill: {self.log()}"
        kill(victims)

    def processes(self) -> list[psutil.Process]:
        return marked(_MARK, str(self.folder))

    def wait(self) -> int:
        """Wait for the driver's end; its exit status."""
        return self.driver.wait(_LIMIT_S)

    def log(self) -> str:
        return (self.folder / "log").read_text()


@pytest.fixture
def gated(tmp_path: Path) -> Iterator[GatedSweep]:
    """A sweep that is not started yet; in the end nothing of it runs on."""
    temporary = Path(tempfile.mkdtemp(prefix="r"))
    sweep = GatedSweep(tmp_path, temporary)
    yield sweep
    kill(sweep.processes())
    shutil.rmtree(temporary, ignore_errors=True)
