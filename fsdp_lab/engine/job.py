"""A trial as a Ray Train job, run in a process of Ray Tune's."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fsdp_lab.config import TrialConfig, UserError, from_dict
from fsdp_lab.config.sweep import Placement
from fsdp_lab.config.training import TrainingConfig
from fsdp_lab.engine import shortcut
from fsdp_lab.engine.cluster import set_environment
from fsdp_lab.engine.files_of_ranks import at_end, receive, receive_now
from fsdp_lab.engine.outcome import end_trial, is_final, log_sizes, note_deaths, why
from fsdp_lab.engine.rendezvous import backend_config
from fsdp_lab.engine.resources import mark_of, release_placement_group, worker_resources
from fsdp_lab.engine.worker import train_worker
from fsdp_lab.record.trial_files import ENDED, TrialWriter, read_metrics, read_progress, wait_until_alone
from fsdp_lab.record.trial_json import changing, read_trial, set_aside_failures
from fsdp_lab.storage.objects import Storage

_ALONE_LIMIT_S = 60.0  # to wait for a killed run's processes: Ray notices its death after some seconds
_LOOK_S = 0.1  # between two checks for a new epoch
_KILL_LOOKS = 300  # checks in half a minute: Ray reports a rank that the kernel killed only after a while


@dataclass(frozen=True)
class Job:
    """The input of a trial's processes. Plain values only: it crosses process boundaries.

    Attributes:
        config: `to_dict` of a `TrialConfig`.
        folder: the trial's. Every node sees it, or, with `storage`, only the driver's.
        launched_in: the working directory of the command, which relative paths refer to in every process.
        ray_is_ours: the driver started Ray, which ends with the driver.
        storage: the trial's address in object storage; None: the folder is shared.
    """

    config: dict[str, Any]
    folder: str
    num_workers: int
    cpus_per_worker: float
    use_gpu: bool
    launched_in: str
    timeout_s: float | None
    wait_timeout_s: float
    max_failures: int
    ray_is_ours: bool
    by_shortcut: bool = True
    storage: str | None = None
    placement: str = Placement.pack.name

    @property
    def each(self) -> dict[str, float]:
        return worker_resources(self.cpus_per_worker, self.use_gpu)


def trial_function(config: dict[str, Any]) -> None:
    """Run one trial: the function that Ray Tune calls. Tune ends it by raising SystemExit inside a report."""
    from ray import tune

    job = Job(**json.loads(config["job"]))
    note_process(Path(job.folder))
    run_job(job, tune.report)


def note_process(folder: Path) -> None:
    """Record the trial's own process: Ray's memory monitor names the processes that it kills."""
    import ray

    with suppress(OSError, UserError), changing(folder) as trial:
        trial.process = ray.get_runtime_context().get_worker_id()


def run_job(job: Job, report: Callable[[dict[str, Any]], None]) -> None:
    """Train with restarts, and write the outcome into the trial's folder if it is writable.

    Args:
        report: gets the metrics of each epoch once, after they are in the folder; not called again after it has raised.
    """
    folder, begun, failed = Path(job.folder), time.monotonic(), None
    # the folder was removed while the trial waited, and Ray Train would create it again; or a kill came after the end
    if not folder.is_dir() or read_trial(folder).outcome:
        return
    try:
        set_aside_failures(folder)  # of an earlier start
        wait_until_alone(folder, _ALONE_LIMIT_S)
        epochs = Epochs(folder, from_dict(TrialConfig, job.config).training, report)
        with at_end(lambda: receive(Storage(job.storage), folder) if job.storage else None):
            train_with_retries(job, epochs)
        epochs.report(ended=True)
    except Exception as error:  # noqa: BLE001 - any end of the job is a result of the trial
        failed = error
    otherwise = why(failed, job.each, job.num_workers, job.wait_timeout_s) if failed else None
    end_trial(folder, time.monotonic() - begun, failed, otherwise)


class Epochs:
    """Reports each epoch in `metrics.jsonl` once.

    The last epoch is reported when the trial has ended: otherwise a scheduler could stop it before it exports its
    model.
    """

    def __init__(self, folder: Path, training: TrainingConfig, report: Callable[[dict[str, Any]], None]) -> None:
        self._folder, self._training, self._report = folder, training, report
        self._reported: set[float] = set()
        self._seen: tuple[int, int] | None = None

    def report(self, ended: bool = False) -> None:
        """Report new epochs; an unchanged file is not read."""
        file = self._folder / "metrics.jsonl"
        seen = (status.st_mtime_ns, status.st_size) if file.exists() and (status := file.stat()) else None
        if seen == self._seen and not ended:
            return
        self._seen = seen
        for metrics in read_metrics(self._folder):
            is_last = self._training.is_through(int(metrics["epoch"]), int(metrics.get("step", 0)))
            if metrics["epoch"] not in self._reported and (ended or not is_last):
                self._reported.add(metrics["epoch"])
                self._report(metrics)


def train_with_retries(job: Job, epochs: Epochs) -> None:
    """Train with Ray Train, and retry failures that another attempt may fix, up to `cluster.max_failures` times.

    Raises:
        ray.train.TrainingFailedError: workers failed, or could not be placed within `cluster.wait_timeout_s`.
    """
    import ray
    from ray.train import TrainingFailedError

    folder = Path(job.folder)
    for left in range(job.max_failures, -1, -1):
        before, kills = log_sizes(folder), deque([kernel_kills()], maxlen=_KILL_LOOKS)
        try:
            train_once(job, epochs, kills)
            return
        except TrainingFailedError as error:
            if job.storage:
                receive_now(job.storage, folder)  # for the logs
            here = ray.get_runtime_context().get_node_id()
            errors = getattr(error, "worker_failures", {})
            note_deaths(folder, errors, job.timeout_s, before, here, kernel_kills() > kills[0])
            if not left or is_final(folder, error):
                raise
        set_aside_failures(folder)
        with suppress(TimeoutError):  # NFS keeps the locks of a dead node for longer
            wait_until_alone(folder, _ALONE_LIMIT_S)  # workers end a moment after Ray has killed them


def train_once(job: Job, epochs: Epochs, kills: deque[int]) -> None:
    """Train with Ray Train in a thread, and report epochs meanwhile. If this raises, the workers are removed.

    Args:
        kills: gets the counts of `kernel_kills`.
    """
    Path(job.folder, "progress.json").unlink(missing_ok=True)  # of an earlier attempt
    ended: Future[None] = Future()
    threading.Thread(target=_fit, args=(job, ended), name="Ray Train", daemon=True).start()
    try:
        while not wait([ended], timeout=_LOOK_S).done:
            if read_progress(Path(job.folder)).get("phase") == ENDED:
                return  # without waiting for Ray Train, which may take many seconds to end
            epochs.report()
            kills.append(kernel_kills())
        ended.result()
    except BaseException:  # Tune ends a trial by SystemExit
        release_placement_group(Path(job.folder))  # Ray forgets workers that ended while they started
        raise


def _fit(job: Job, ended: Future[None]) -> None:
    try:
        trainer(job).fit()
    except BaseException as error:  # noqa: BLE001 - raised in the waiting thread
        ended.set_exception(error)
    else:
        ended.set_result(None)


def trainer(job: Job) -> Any:
    """Return a Ray Train trainer for the job."""
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(job.wait_timeout_s)
    set_environment()
    from ray.train import FailureConfig, RunConfig, ScalingConfig, UserCallback

    writer = TrialWriter(Path(job.folder))

    class Report(UserCallback):
        def after_report(self, run_context: Any, metrics: Sequence[dict[str, Any]], checkpoint: Any) -> None:
            writer.receive(metrics[0])

    callbacks: list[Any] = [Report()]  # RunConfig's annotation excludes UserCallback
    settings: dict[str, Any] = {
        "train_loop_config": asdict(job),
        "scaling_config": ScalingConfig(
            num_workers=job.num_workers,
            use_gpu=job.use_gpu,
            resources_per_worker={**job.each, "memory": mark_of(Path(job.folder))},
            placement_strategy=Placement[job.placement].value,
        ),
        "run_config": RunConfig(
            name=".ray_train",
            storage_path=job.folder,
            failure_config=FailureConfig(max_failures=0, controller_failure_limit=0),  # type: ignore[call-arg]
            callbacks=callbacks,
        ),
    }
    backend = backend_config(Path(job.folder))
    if job.by_shortcut:
        return shortcut.trainer_class(job.ray_is_ours)(train_worker, backend_config=backend, **settings)
    from ray.train.torch import TorchTrainer

    return TorchTrainer(train_worker, torch_config=backend, **settings)


def kernel_kills() -> int:
    """Return how many processes the kernel has killed because memory ran out; 0 on a machine that does not count."""
    with suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
