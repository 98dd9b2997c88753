"""A trial as a Ray Train job, run in a process of Ray Tune's."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fsdp_lab.config import TrialConfig, from_dict
from fsdp_lab.config.sweep import Placement
from fsdp_lab.engine import ray_private
from fsdp_lab.engine.attempts import Attempts, why
from fsdp_lab.engine.cluster import set_environment
from fsdp_lab.engine.files_of_ranks import at_end, receive
from fsdp_lab.engine.rendezvous import backend_config
from fsdp_lab.engine.reports import Reports, end_trial
from fsdp_lab.engine.resources import release_placement_group, worker_resources
from fsdp_lab.engine.stacks import Frame, dump_stacks, find_stuck, long_s
from fsdp_lab.engine.worker import read_worker_progress, train_worker
from fsdp_lab.record.failures import RankFailure, record_failure, set_aside_failures
from fsdp_lab.record.reasons import Code, Reason
from fsdp_lab.record.trial_files import wait_until_alone, write_progress
from fsdp_lab.storage import Storage

_ALONE_LIMIT_S = 60.0  # for the processes of a run that was killed: Ray takes some seconds to see that it died
_LONGEST_LOOK_S = 5.0  # that counts as waiting for a trial's next step


@dataclass(frozen=True)
class Job:
    """The input of a trial's processes. Plain values only: it crosses process boundaries.

    Attributes:
        config: `to_dict` of a `TrialConfig`.
        folder: the trial's. Every node sees it, or, with `storage`, only the driver's.
        num_workers: the resolved `cluster.num_workers`.
        cpus_per_worker: the resolved `cluster.cpus_per_worker`.
        launched_in: the working directory of the command, so that relative paths mean the same in every process.
        timeout_s: `trial_timeout_s`; None: never.
        ray_is_ours: the driver started Ray, which ends with the driver.
        storage: the trial's address in object storage; None: the folder is shared.
        nodes: ids of the nodes that the sweep has seen alive.
        placement: a name of `Placement`.
        workers_per_node: workers of one bundle of the placement group, which are on one node.
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
    storage: str | None = None
    nodes: Sequence[str] = ()
    placement: str = Placement.pack.name
    workers_per_node: int = 1

    @property
    def each(self) -> dict[str, float]:
        return worker_resources(self.cpus_per_worker, self.use_gpu)


def trial_function(config: dict[str, Any]) -> None:
    """Run one trial by its job: the function of Ray Tune. Tune ends it from within a report, by SystemExit."""
    from ray import tune

    run_job(Job(**json.loads(config["job"])), tune.report)


def run_job(job: Job, report: Callable[[dict[str, Any]], None]) -> None:
    """Train to the end, including restarts, and write `outcome.json` in the trial's folder if that can be written.

    Args:
        report: gets the metrics of each epoch once, when the folder has them; not called again after it has raised.
    """
    folder, begun, failed = Path(job.folder), time.monotonic(), None
    if not folder.is_dir():  # removed while the trial waited for its place; Ray Train would make it again
        return
    try:
        set_aside_failures(folder)  # of a start before this one
        wait_until_alone(folder, _ALONE_LIMIT_S)
        config = from_dict(TrialConfig, job.config)
        fit(job, config.offload.backend(job.use_gpu), Reports(folder, config.training, report))
    except Exception as error:  # noqa: BLE001 - any end of the job is a result of the trial
        failed = error
    end_trial(
        folder,
        time.monotonic() - begun,
        failed,
        lambda error: why(error, job.each, job.num_workers, job.wait_timeout_s, job.nodes),
    )


def fit(job: Job, backend: str, reports: Reports) -> None:
    """Train with Ray Train and wait for it. However this ends, the workers and their placement groups are removed.

    Ray Train's controller runs in this process, Tune's own, because another process would import all of Ray Train anew
    for each trial (`ray_private.fit_here`).

    Raises:
        StorageRefused, StorageAway: the files of ranks cannot be read.
        ray.train.TrainingFailedError: workers failed more than `cluster.max_failures` times, or could not be placed
            within `cluster.wait_timeout_s`.
    """
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(job.wait_timeout_s)
    set_environment()
    folder = Path(job.folder)
    watch = Watch(folder, job.timeout_s, job.wait_timeout_s)
    attempts = Attempts(folder, watch.begin)

    def ask() -> dict[str, float | str] | None:
        attempts.look()
        return ray_private.ask_ranks(attempts.group(), read_worker_progress, [0]).get(0)

    watch.ask = ask
    watch.ask_stacks = lambda: ray_private.ask_ranks(attempts.group(), dump_stacks, range(job.num_workers))
    settings = trainer_settings(job, backend, reports)
    with at_end(lambda: receive(Storage(job.storage), folder) if job.storage else None):
        try:
            with watch.watching():
                ray_private.fit_here(settings, job.folder, attempts, job.workers_per_node, job.ray_is_ours)
        except BaseException:  # Tune ends a trial by SystemExit
            release_placement_group(folder)  # Ray forgets workers that started and could not make their process group
            raise
    reports.finish()


def trainer_settings(job: Job, backend: str, reports: Reports) -> dict[str, Any]:
    """Return the arguments of a `DataParallelTrainer`, the base of `TorchTrainer` that does not import PyTorch."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig, UserCallback

    class Report(UserCallback):
        def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
            reports.receive(metrics[0])

    callbacks: list[Any] = [Report()]  # a UserCallback is none of the type that RunConfig names
    return {
        "train_loop_per_worker": train_worker,
        "train_loop_config": asdict(job),
        "backend_config": backend_config(Path(job.folder), backend),
        "scaling_config": ScalingConfig(
            num_workers=job.num_workers,
            use_gpu=job.use_gpu,
            resources_per_worker=job.each,
            placement_strategy=Placement[job.placement].value,
        ),
        "run_config": RunConfig(
            name=".ray_train",
            storage_path=job.folder,
            failure_config=FailureConfig(  # the controller's: workers that were killed while they started
                max_failures=job.max_failures,
                controller_failure_limit=job.max_failures,  # type: ignore[call-arg]
            ),
            callbacks=callbacks,
        ),
    }


class Watch:
    """Ends a trial that begins no step and no phase for too long, by removing its workers' placement groups.

    It asks rank 0's worker once a second what it is doing, and writes the answer into the trial's folder. If that lasts
    unusually long, all ranks write their stacks into their logs, and the answer says which one is stuck.

    No clock of the trial's is compared with one here, and a second counts only if it was seen to pass: the wall clock
    may be set, and a trial on a suspended machine is not stuck.

    Args:
        timeout_s: the limit; None: none.
        wait_timeout_s: added before the first step of an attempt, when workers may wait for resources.

    Attributes:
        ask: returns what rank 0 is doing, None if it does not answer.
        ask_stacks: returns the stacks of the ranks that answer.
    """

    def __init__(self, folder: Path, timeout_s: float | None, wait_timeout_s: float) -> None:
        self._folder, self._timeout_s, self._wait_timeout_s = folder, timeout_s, wait_timeout_s
        self._over = threading.Event()
        self.ask: Callable[[], dict[str, float | str] | None] = lambda: None
        self.ask_stacks: Callable[[], dict[int, list[Frame]]] = dict
        self.begin()

    def begin(self) -> None:
        """Restart the count: the workers of an attempt are about to start."""
        self._known: dict[str, float | str] = {}
        self._started, self._idle_s, self._since = False, 0.0, dict[str, Any]()
        self._asked = False
        self._stuck: dict[str, Any] | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        thread = threading.Thread(target=self._watch, name="watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join(timeout=10.0)

    def _watch(self) -> None:
        looked = time.monotonic()
        while not self._over.wait(1.0):
            progress = self.ask()
            now = time.monotonic()
            passed, looked = min(now - looked, _LONGEST_LOOK_S), now
            self.look(progress, passed)

    def look(self, progress: dict[str, float | str] | None, passed_s: float) -> None:
        """Handle an answer of rank 0, so many seconds after the last one; end the trial if it is stuck."""
        self._idle_s += passed_s
        if progress and progress != self._known:
            self._known, self._idle_s, self._since = progress, 0.0, _begun(progress)
            self._asked, self._stuck = False, None
            self._started = self._started or "step" in progress or "reported" in progress
            write_progress(self._folder, progress)
        if self._idle_s > long_s(self._timeout_s) and not self._asked:
            self._asked, self._stuck = True, find_stuck(self._folder, self.ask_stacks())
            if self._stuck:
                write_progress(self._folder, {**self._known, "stuck": self._stuck})
        limit_s = self._timeout_s
        if limit_s is not None and self._idle_s > (limit_s if self._started else limit_s + self._wait_timeout_s):
            reason = Reason.of(Code.timed_out, rank=0, limit_s=limit_s, stuck=self._stuck, **self._since)
            record_failure(self._folder, RankFailure(reason))
            release_placement_group(self._folder)
            self.begin()


def _begun(progress: Mapping[str, float | str]) -> dict[str, Any]:
    name = "phase" if "phase" in progress else "step"
    return {name: progress[name]} if name in progress else {}
