"""A sweep in which everything is killed once, each at a named state: nothing is missing and nothing is left."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from mlflow import MlflowClient

from tests.processes import still_running
from tests.ranks import Memo, config, run_ranks
from tests.servers import free_port, lay_store, mlflow_server
from tests.sweep.gates import MODEL, SETTINGS, GatedSweep, gated_sweep

pytestmark = [pytest.mark.ci, pytest.mark.timeout(2400)]

EPOCHS = 4
TRIALS = (0, 1)
WORDS = (f"training.epochs={EPOCHS}", "cluster.num_workers=2", "cluster.cpus_per_worker=1", "cluster.max_failures=9",
         "tracking.patience_s=60")  # fmt: skip


class Server:
    """A real `mlflow server`, which is killed and started again at the same address."""

    def __init__(self, folder: Path) -> None:
        lay_store(folder)
        self.folder, self.port = folder, free_port()
        self.uri = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        store, kept = f"sqlite:///{self.folder}/mlflow.db", str(self.folder / "kept")
        self._running = ExitStack()
        start = mlflow_server(self.folder, "--artifacts-destination", kept, store=store, port=self.port)
        self._running.enter_context(start)

    def kill(self) -> None:
        """Its process group gets SIGKILL."""
        self._running.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture(params=["", pytest.param("1", marks=pytest.mark.full)], ids=["", "without the shortcut"])
def sweep(
    tmp_path: Path, server: Server, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[GatedSweep]:
    monkeypatch.setenv("FSDP_LAB_PUBLIC_RAY", request.param)
    with gated_sweep(tmp_path) as sweep:
        yield sweep


def test_a_sweep_survives_every_kill(sweep: GatedSweep, server: Server):
    sweep.start_trials(len(TRIALS), *WORDS, f"tracking.uri={server.uri}")
    _kill_all_of_the_first_trial(sweep, server)
    _kill_ray_and_the_driver_under_the_second(sweep)
    assert sweep.killed == [
        "rank 0", "rank 1", "MLflow server", "controller", "actor by which ranks report", "raylet", "driver"
    ]  # fmt: skip
    assert sweep.sweep.statuses == ["finished"] * len(TRIALS), sweep.log()
    _check_runs(sweep, server)
    assert still_running(sweep.processes(), 15) == []
    of_lost_raylet, of_killed_driver, of_last = sweep.sessions
    assert of_lost_raylet.exists() and of_killed_driver.exists(), "their logs may have the reason"
    assert not of_last.exists()


def _kill_all_of_the_first_trial(sweep: GatedSweep, server: Server) -> None:
    """Each time the driver lives on, and another attempt resumes from the epochs that are written."""
    sweep.kill("rank 0", [sweep.rank(0, 1)])
    sweep.note_session()
    sweep.let_go(0, 1)
    sweep.rank(0, 2)
    sweep.kill("rank 1", [sweep.rank(0, 2, rank=1)])
    sweep.let_go(0, 2)
    sweep.rank(0, 3)
    server.kill()
    sweep.killed.append("MLflow server")
    sweep.let_go(0, 3)
    sweep.rank(0, 4)  # it has gone on without the store
    server.start()
    sweep.kill("controller", sweep.named("ImplicitFunc"))
    sweep.let_go(0, 4)


def _kill_ray_and_the_driver_under_the_second(sweep: GatedSweep) -> None:
    """Each resume goes on from the epochs that are written."""
    sweep.rank(1, 1)
    sweep.kill("actor by which ranks report", sweep.named("SynchronizationActor"))
    sweep.let_go(1, 1)
    sweep.rank(1, 2)
    sweep.kill("raylet", sweep.named("raylet/raylet"))
    assert sweep.wait() == 130, sweep.log()
    assert "resume=out" in sweep.log()
    sweep.start("resume=out")
    sweep.let_go(1, 2)
    sweep.rank(1, 3)
    assert sweep.sweep.trials[1].checkpoints, "of the epochs before"
    sweep.note_session()
    sweep.kill("driver", [psutil.Process(sweep.driver.pid)])
    sweep.wait()
    assert still_running(sweep.processes(), 15) == [], "the driver's death ends Ray and its workers"
    sweep.let_go(1, 3)  # not before: a worker that has yet to end would go on
    sweep.start("resume=out")
    sweep.rank(1, 4)
    sweep.note_session()
    sweep.let_go(1, 4)
    assert sweep.wait() == 0, sweep.log()


def _check_runs(sweep: GatedSweep, server: Server) -> None:
    """One run a trial, every epoch once, and the losses of a run that nobody kills."""
    client = MlflowClient(tracking_uri=server.uri)
    runs = client.search_runs([e.experiment_id for e in client.search_experiments()])
    children = [run for run in runs if "mlflow.parentRunId" in run.data.tags]
    assert len(children) == len(TRIALS) and len(runs) == len(TRIALS) + 1, sweep.log()
    assert {run.info.status for run in runs} == {"FINISHED"}
    (undisturbed, _) = run_ranks(2, _train, str(sweep.folder))
    for run in children:
        for key in ("train/loss", "val/loss", "perf/samples_per_s", "memory/peak_bytes"):
            points = sorted((p.step, p.value) for p in client.get_metric_history(run.info.run_id, key))
            assert [step for step, _ in points] == list(range(1, EPOCHS + 1)), key
            if key == "train/loss":
                assert [loss for _, loss in points] == pytest.approx(undisturbed, rel=1e-6)


def _train(folder: str) -> list[float]:
    """The losses of a trial without the platform, whose epochs all may begin."""
    from fsdp_lab.training.train import train

    os.chdir(folder)
    sys.path.insert(0, folder)
    Path("go", "9.1").touch()
    memo = Memo()
    with tempfile.TemporaryDirectory() as own:
        train(config(*SETTINGS, MODEL, f"training.epochs={EPOCHS}", "model.trial=9"), Path(own), memo)
    return [metrics["train/loss"] for metrics in memo.reported]
