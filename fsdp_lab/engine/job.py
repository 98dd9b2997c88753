"""A trial as a Ray Train job, run in a process of Ray Tune's."""

from __future__ import annotations

import json
import os
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fsdp_lab.engine.cluster import set_environment, worker_resources
from fsdp_lab.engine.files import Outcome, read_failures, write_json


@dataclass(frozen=True)
class Job:
    """What a trial's processes are given. Plain values only: it crosses process borders.

    `config` is `to_dict` of the trial's; `folder` is seen by every node; `launched_in` is where the
    command was typed, so that relative paths mean the same in every process.
    """

    config: dict[str, Any]
    folder: str
    num_workers: int
    use_gpu: bool
    launched_in: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_job(job: Job) -> None:
    """Train to the end, restarts included; leaves `outcome.json` in the trial's folder, whatever happens.

    Only a disk that is full or away stops it from that: the driver finds no outcome, and looks at the disk.
    """
    folder = Path(job.folder)
    try:
        fit(job)
        failures = read_failures(folder)
        outcome = Outcome("failed", failures[0]["message"]) if failures else Outcome("finished")
    except Exception as error:  # noqa: BLE001 - any end of the job is a result of the trial
        with suppress(OSError):
            (folder / "error.txt").write_text(traceback.format_exc())
        failures = read_failures(folder)
        cause = failures[0] if failures else {"kind": "error", "message": first_line(error)}
        outcome = Outcome("oom" if cause["kind"] == "oom" else "failed", cause["message"])
    with suppress(OSError):
        write_json(folder / "outcome.json", asdict(outcome))


def fit(job: Job) -> None:
    """Build the `TorchTrainer` and wait for it.

    Raises:
        ray.train.TrainingFailedError: workers failed more than `cluster.max_failures` times, or could not be
            placed within `cluster.wait_timeout_s`.
    """
    cluster = job.config["cluster"]
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(cluster["wait_timeout_s"])
    set_environment()
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer
    from ray.tune.integration.ray_train import TuneReportCallback

    from fsdp_lab.config.schema import ClusterConfig
    from fsdp_lab.engine.worker import train_worker

    class Trainer(TorchTrainer):
        """Without Ray's placement-group cleaner: one more process for each trial, which asks a dashboard that is
        not there and then takes 12 s to be given up on. The workers' own shutdown frees their places."""

        def _create_default_callbacks(self) -> list[Any]:
            callbacks = super()._create_default_callbacks()  # type: ignore[misc]
            return [c for c in callbacks if type(c).__name__ != "PlacementGroupCleanerCallback"]

    trainer = Trainer(
        train_worker,
        train_loop_config=job.as_dict(),
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if job.use_gpu else "gloo"),
        scaling_config=ScalingConfig(
            num_workers=job.num_workers,
            use_gpu=job.use_gpu,
            resources_per_worker=worker_resources(ClusterConfig(**cluster), job.use_gpu),
        ),
        run_config=RunConfig(
            name=".ray_train",
            storage_path=job.folder,
            failure_config=FailureConfig(max_failures=cluster["max_failures"], controller_failure_limit=0),  # type: ignore[call-arg]
            callbacks=[TuneReportCallback()],  # type: ignore[list-item]
        ),
    )
    trainer.fit()


def first_line(error: BaseException) -> str:
    """The last line of an error that says something, cut to what fits a table."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:300]


def trial_function(config: dict[str, Any]) -> None:
    """What Ray Tune calls: one trial, by its job."""
    run_job(Job(**json.loads(config["job"])))
