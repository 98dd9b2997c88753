"""A sweep of trials that begin an epoch only when a test says so: states that it can wait for, and kill in."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.conftest import PLAIN, SIZES, command_line
from tests.folders import SweepFolder
from tests.processes import called, marked
from tests.sweep import fates
from tests.sweep.conftest import wait_for

MODEL = "model._target_=fates.Gated"
SETTINGS = (*SIZES, *PLAIN)
LIMIT_S = 600  # for a state to be reached, on the slowest machine: beyond it something hangs
_MARK = "FSDP_LAB_GATED"  # in the environment of the sweep's processes


class GatedSweep:
    """A sweep that is started in a folder, and again after its driver has ended.

    Args:
        folder: of the sweep, which is `out` in it.
        temporary: for Ray's files; short, since the paths of its sockets have to be.
    """

    def __init__(self, folder: Path, temporary: Path) -> None:
        self.folder, self.temporary = folder, temporary
        self.command = command_line()
        for name in ("at", "go"):
            (folder / name).mkdir()
        shutil.copy(Path(fates.__file__), folder)

    @property
    def sweep(self) -> SweepFolder:
        return SweepFolder(self.folder / "out")

    def start(self, *words: str) -> None:
        environment = {**os.environ, _MARK: str(self.folder), "RAY_TMPDIR": str(self.temporary)}
        with (self.folder / "log").open("ab") as log:
            self.driver = subprocess.Popen(
                [*self.command, *words], cwd=self.folder, env=environment, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def start_trials(self, count: int, *words: str) -> None:
        numbers = ",".join(map(str, range(count)))
        self.start("-m", MODEL, *SETTINGS, f"model.trial={numbers}", "hydra.sweep.dir=out",
                   "forecast.enabled=false", *words)  # fmt: skip

    def rank(self, trial: int, epoch: int, rank: int = 0) -> psutil.Process:
        """Wait until a trial has begun an epoch, with all epochs before in its folder; the process of a rank."""
        at = self.folder / "at" / f"{trial}.{epoch}.{rank}"

        def begun() -> psutil.Process | None:
            text = at.read_text() if at.exists() else ""
            if [number for number, *_ in self.sweep.trials[trial].losses] != list(range(1, epoch)):
                return None
            with suppress(psutil.NoSuchProcess):
                return psutil.Process(int(text)) if text.endswith("\n") else None
            return None

        process: psutil.Process = wait_for(begun, self.driver, LIMIT_S, self.log)
        return process

    def let_go(self, trial: int, *epochs: int) -> None:
        for epoch in epochs:
            (self.folder / "go" / f"{trial}.{epoch}").touch()

    def kill(self, name: str, victims: Sequence[psutil.Process]) -> None:
        """Kill the processes, of which there has to be one."""
        assert victims, f"there is no {name} to kill: {self.log()}"
        for victim in victims:
            victim.kill()

    def named(self, word: str) -> list[psutil.Process]:
        return called(word, self.driver.pid)

    def processes(self) -> list[psutil.Process]:
        return marked(_MARK, str(self.folder))

    def wait(self) -> int:
        """Wait for the driver's end; its exit status."""
        return self.driver.wait(LIMIT_S)

    def log(self) -> str:
        return (self.folder / "log").read_text()


@contextmanager
def gated_sweep(folder: Path) -> Iterator[GatedSweep]:
    """A sweep that is not started yet; in the end nothing of it runs on."""
    temporary = Path(tempfile.mkdtemp(prefix="r"))
    sweep = GatedSweep(folder, temporary)
    try:
        yield sweep
    finally:
        for process in sweep.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        shutil.rmtree(temporary, ignore_errors=True)
