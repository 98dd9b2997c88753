"""However a trial fails, what its workers held is free afterwards, also on a cluster that we did not start.

The trials run after each other on a cluster that holds the workers of one: each starts because those before let go.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from fsdp_lab.config import TrialConfig, to_dict
from fsdp_lab.engine.job import Job
from fsdp_lab.record.trial_json import read_trial
from fsdp_lab.report.render import reason_text
from tests.conftest import ROOT
from tests.engine.ray_cluster import ray_head
from tests.processes import called

pytestmark = [pytest.mark.full, pytest.mark.timeout(200)]

# Runs one job a line in an actor, as Tune does, and answers when all of the cluster's cores are free.
_RUN_JOBS = """
import json, sys, time
from fsdp_lab.engine.cluster import start_ray
from fsdp_lab.config.sweep import ClusterConfig
start_ray(ClusterConfig(address=sys.argv[1]))
import ray

@ray.remote(num_cpus=0)
class Tune:
    def run(self, given):
        from fsdp_lab.engine import job
        job.run_job(job.Job(**given), lambda metrics: None)

tune = Tune.remote()
for line in sys.stdin:
    ray.get(tune.run.remote(json.loads(line)))
    while ray.available_resources().get("CPU") != 2:
        time.sleep(0.02)
    print("released", flush=True)  # Ray prints lines, too
"""


class Runner:
    """Trials on a cluster with two cores. `raylet`: the process below which its workers are."""

    def __init__(self, process: subprocess.Popen[str], raylet: int) -> None:
        self._process, self.raylet = process, raylet

    def run(self, folder: Path, config: dict[str, Any], num_workers: int = 2) -> None:
        """Run a trial in a folder, and wait until all cores are free."""
        job = Job(
            config, str(folder), num_workers, 1.0, False, str(ROOT), 100.0, 3.0 if num_workers > 2 else 60.0, 0, False
        )  # fmt: skip
        assert self._process.stdin and self._process.stdout
        print(json.dumps(asdict(job)), file=self._process.stdin, flush=True)
        next(line for line in self._process.stdout if line == "released\n")


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    variables = {
        **os.environ,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "PYTHONPATH": str(ROOT),
    }
    with (
        ray_head(variables) as (address, head),
        subprocess.Popen(
            [sys.executable, "-c", _RUN_JOBS, address], env=variables, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        ) as process,
    ):  # fmt: skip
        yield Runner(process, head.pid)
        process.kill()


@pytest.fixture
def config() -> dict[str, Any]:
    """A trial of one step."""
    config = to_dict(TrialConfig())
    config["data"] |= {"num_train": 64, "num_val": 32}
    config["training"] |= {"max_steps": 1, "global_batch_size": 32, "timing_warmup_steps": 0}
    return config


def error_of(folder: Path) -> str:
    outcome = read_trial(folder).outcome
    assert outcome is not None and outcome.reason is not None, outcome
    return reason_text(outcome.reason)


def test_when_there_is_no_place(runner: Runner, config: dict[str, Any], tmp_path: Path):
    runner.run(tmp_path, config, num_workers=3)
    assert "wait" in error_of(tmp_path)


def test_when_a_worker_dies_while_it_starts(runner: Runner, config: dict[str, Any], tmp_path: Path):
    done = threading.Event()

    def kill() -> None:
        while not done.is_set():
            for worker in called("RayTrainWorker", runner.raylet)[:1]:
                worker.kill()
                return
            time.sleep(0.02)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        runner.run(tmp_path, config)
    finally:
        done.set()
        thread.join()
    assert error_of(tmp_path)


def test_when_the_first_step_fails_on_one_rank(runner: Runner, config: dict[str, Any], tmp_path: Path):
    config["model"] = {"_target_": "tests.sweep.fates.Fate", "fate": "raises", "mark": ""}
    runner.run(tmp_path, config)
    assert "the first step fails" in error_of(tmp_path)


def test_when_the_model_cannot_be_exported(runner: Runner, config: dict[str, Any], tmp_path: Path):
    (tmp_path / "model.pt" / "taken").mkdir(parents=True)
    runner.run(tmp_path, config)
    assert "model.pt" in error_of(tmp_path)


def test_the_next_trial_starts(runner: Runner, config: dict[str, Any], tmp_path: Path):
    runner.run(tmp_path, config)
    outcome = read_trial(tmp_path).outcome
    assert outcome is not None and outcome.reason is None
