"""A night in which everything is killed, again and again: at the end nothing is missing and nothing is left."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from mlflow import MlflowClient

from tests.conftest import command_line
from tests.processes import called, descendants, still_running
from tests.ranks import Memo, config, run_ranks
from tests.servers import lay_store
from tests.sweep.conftest import ranks_of, results

pytestmark = [pytest.mark.ci, pytest.mark.timeout(480)]

EPOCHS = 40  # else it is over before all are killed
RATES = ("1e-3", "2e-3", "3e-3", "4e-3", "5e-3", "6e-3", "7e-3", "8e-3")
SETTINGS = ("model=mlp", "data.num_train=960", "data.num_val=32", "training.global_batch_size=32", "precision=fp32",
            f"training.epochs={EPOCHS}", "sharding=per_block", "reshard_after_forward=always")  # fmt: skip
SWEEP = ("-m", *SETTINGS, f"optimizer.lr={','.join(RATES)}", "offload=none", "cluster.num_workers=1",
         "cluster.max_failures=50", "forecast.enabled=false", "hydra.sweep.dir=out",
         "tracking.patience_s=20")  # fmt: skip
KILLS = 7
LIMIT_S = 420


class Server:
    """A real `mlflow server` on a port of its own; killed, it is started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [
            sys.executable, "-m", "mlflow", "server", "--port", str(self.port), "--workers", "1",
            "--backend-store-uri", f"sqlite:///{self.folder}/mlflow.db", "--artifacts-destination",
            str(self.folder / "kept"),
        ]  # fmt: skip
        env = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # starts sooner
        with (self.folder / "server.log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=env)

    def answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(timeout=20)

    def wait(self) -> None:
        end = time.monotonic() + 90
        while not self.answers():
            assert time.monotonic() < end, (self.folder / "server.log").read_text()
            time.sleep(0.2)

    def restart(self) -> None:
        self.kill()
        self.process = self._start()


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    lay_store(folder)
    server = Server(folder)
    try:
        server.wait()
        yield server
    finally:
        server.kill()


class Night:
    """The driver, what is below it, and everything that was ever below it."""

    def __init__(self, folder: Path, uri: str) -> None:
        self.folder, self.uri = folder, uri
        self.family: set[psutil.Process] = set()
        self.log = (folder / "night.log").open("ab")
        self.starts = 0
        self.start()

    def start(self) -> None:
        words = SWEEP if self.starts == 0 or not (self.folder / "out" / "sweep.json").exists() else ("resume=out",)
        self.starts += 1
        self.log.write(f"=== start {self.starts}: {words}\n".encode())
        self.log.flush()
        self.driver = subprocess.Popen(
            command_line(*words, *([] if words[0] != "-m" else [f"tracking.uri={self.uri}"])),
            cwd=self.folder, stdout=self.log, stderr=self.log, start_new_session=True,
        )  # fmt: skip

    def look(self) -> None:
        self.family.update(descendants(self.driver.pid))

    def find(self, name: str) -> psutil.Process | None:
        return next(iter(called(name, self.driver.pid)), None)


def uninterrupted(rate: str) -> list[float]:
    """The losses of a trial that nobody kills, trained without the platform."""
    (losses,) = run_ranks(1, _train, rate)
    return losses


def _train(rate: str) -> list[float]:
    import tempfile

    from fsdp_lab.training import train

    memo = Memo()
    with tempfile.TemporaryDirectory() as folder:
        train(config(*(s for s in SETTINGS if "=" in s), f"optimizer.lr={rate}"), Path(folder), memo)
    return [metrics["train/loss"] for metrics in memo.reported]


def test_a_sweep_survives_everything(tmp_path: Path):
    dice = random.Random(20261120)
    begun = time.monotonic()
    with serving(tmp_path) as server:
        night = Night(tmp_path, f"http://127.0.0.1:{server.port}")
        victims: dict[str, Callable[[], bool]] = {
            "driver": lambda: _kill(psutil.Process(night.driver.pid)),
            "worker": lambda: _kill(night.find("RayTrainWorker")),
            "rank": lambda: _kill(next(iter(ranks_of(night.driver)), None)),
            "server of ranks": lambda: _kill(night.find("fsdp_lab.engine.rank_server")),
            "controller": lambda: _kill(night.find("ImplicitFunc")),
            "raylet": lambda: _kill(night.find("raylet/raylet")),
            "server": lambda: server.restart() or True,  # type: ignore[func-returns-value]
        }
        order = [name for _ in range(2) for name in dice.sample(sorted(victims), len(victims))][:KILLS]
        next_kill = time.monotonic() + 12.0
        try:
            while True:
                assert time.monotonic() - begun < LIMIT_S, (tmp_path / "night.log").read_text()[-5000:]
                night.look()
                if night.driver.poll() is not None:
                    if night.driver.returncode in (0, 1):
                        break
                    night.start()
                    next_kill = max(next_kill, time.monotonic() + dice.uniform(8.0, 12.0))
                if order and time.monotonic() > next_kill and victims[order[0]]():
                    night.log.write(f"=== killed: {order[0]}\n".encode())
                    night.log.flush()
                    order.pop(0)
                    next_kill = time.monotonic() + dice.uniform(3.0, 8.0)
                time.sleep(0.2)
            server.wait()
            assert len(order) <= KILLS - 5, "it was over before much was killed"
            client = MlflowClient(tracking_uri=night.uri)
            experiments = [e.experiment_id for e in client.search_experiments()]
            runs = client.search_runs(experiments)
            children = [run for run in runs if "mlflow.parentRunId" in run.data.tags]
            output = (tmp_path / "night.log").read_text()
            assert [row["status"] for row in results(tmp_path)] == ["finished"] * len(RATES), output
            assert len(children) == len(RATES) and len(runs) == len(RATES) + 1, output
            assert {run.info.status for run in runs} == {"FINISHED"}
            by_rate = {run.data.params["optimizer.lr"]: run for run in children}
            for run in children:
                for key in ("train/loss", "val/loss", "perf/samples_per_s", "memory/peak_bytes"):
                    steps = sorted(point.step for point in client.get_metric_history(run.info.run_id, key))
                    assert steps == list(range(1, EPOCHS + 1)), (key, steps)
            for rate in (RATES[0], RATES[-1]):
                history = client.get_metric_history(by_rate[str(float(rate))].info.run_id, "train/loss")
                learned = [point.value for point in sorted(history, key=lambda point: point.step)]
                assert learned == pytest.approx(uninterrupted(rate), rel=1e-6)
        finally:
            _kill(psutil.Process(night.driver.pid)) if night.driver.poll() is None else None
            night.driver.wait(timeout=20)
            night.log.close()
    assert still_running(night.family, 15) == []


def _kill(process: psutil.Process | None) -> bool:
    """Whether there was one to kill."""
    if process is None:
        return False
    with suppress(psutil.NoSuchProcess):
        process.kill()
        return True
    return False
