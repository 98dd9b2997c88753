"""A trial as a Ray Train job, run in a process of Ray Tune's."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fsdp_lab import quick_imports
from fsdp_lab.config.sweep import Placement
from fsdp_lab.engine import ray_private
from fsdp_lab.engine.attempts import Attempts
from fsdp_lab.engine.cluster import set_environment
from fsdp_lab.engine.failures import write_failure
from fsdp_lab.engine.mirror import Receiver
from fsdp_lab.engine.nodes import own_node, write_rank_nodes
from fsdp_lab.engine.rendezvous import arrange_meeting, meeting_folder
from fsdp_lab.engine.resources import placement_group_mark, release_placement_group, worker_resources
from fsdp_lab.engine.stacks import find_stuck
from fsdp_lab.engine.trial_files import (
    Outcome,
    read_failures,
    read_metrics,
    read_phase,
    read_progress,
    set_aside_failures,
    wait_until_alone,
    write_outcome,
)
from fsdp_lab.engine.why import report_of, why
from fsdp_lab.engine.worker import train_worker
from fsdp_lab.status import TrialStatus
from fsdp_lab.storage import Storage, StorageAway, StorageRefused

_ALONE_LIMIT_S = 60.0  # for the processes of a run that was killed: Ray takes some seconds to see that it died
_LOOK_S = 0.25  # for reports, where Ray's controller is another process
_JOIN_S = 1800.0  # for ranks to join, and for a collective: PyTorch's own limit for gloo
_LONGEST_LOOK_S = 5.0  # that counts as waiting for a trial's next step
_START = "its start"


@dataclass(frozen=True)
class Job:
    """The input of a trial's processes. Plain values only: it crosses process boundaries.

    Attributes:
        config: `to_dict` of a `TrialConfig`.
        folder: the trial's. Every node sees it, or, with `storage`, only the driver's.
        num_workers: the resolved `cluster.num_workers`.
        cpus_per_worker: the resolved `cluster.cpus_per_worker`.
        use_gpu: a GPU for each worker.
        launched_in: the working directory of the command, so that relative paths mean the same in every process.
        timeout_s: `trial_timeout_s`; None: never.
        wait_timeout_s: `cluster.wait_timeout_s`.
        max_failures: `cluster.max_failures`.
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
        """Resources of a worker."""
        return worker_resources(self.cpus_per_worker, self.use_gpu)

    def as_dict(self) -> dict[str, Any]:
        """Return the job as plain values."""
        return asdict(self)


def trial_function(config: dict[str, Any]) -> None:
    """Run one trial by its job: the function of Ray Tune. Tune ends it from within a report, by SystemExit."""
    from ray import tune

    run_job(Job(**json.loads(config["job"])), tune.report)


def run_job(job: Job, report: Callable[[dict[str, float]], None]) -> None:
    """Train to the end, including restarts, and write `outcome.json` in the trial's folder, whatever happens.

    If the disk is full or missing, or the folder was removed, the driver finds no outcome and looks at the disk.

    Args:
        job: the trial.
        report: gets `{"epoch": n}` when the folder has the metrics of another epoch; not called again after it has
            raised.
    """
    folder, begun = Path(job.folder), time.monotonic()
    if not folder.is_dir():  # removed while the trial waited for its place; Ray Train would make it again
        return
    try:
        if not wait_until_alone(folder, _ALONE_LIMIT_S):
            raise TimeoutError(f"another run's processes still work in {folder} after {_ALONE_LIMIT_S:.0f} s; end them")
        set_aside_failures(folder)  # of a start before this one
        with receiving(job) as receiver, watched(folder, job.timeout_s, job.wait_timeout_s) as begins:
            fit(job, report, begins, receiver)
        outcome = outcome_of(read_failures(folder))
    except Exception as error:  # noqa: BLE001 - any end of the job is a result of the trial
        with suppress(OSError):
            if not any(failure["kind"] in ("user", "diverged") for failure in read_failures(folder)[:1]):
                (folder / "error.txt").write_text(report_of(folder, error))
        message = why(error, job.each, job.num_workers, job.wait_timeout_s, job.nodes)
        outcome = outcome_of(read_failures(folder) or [{"kind": "error", "message": message}])
    with suppress(OSError):
        write_outcome(folder, Outcome(outcome.status, outcome.error, time.monotonic() - begun))


def outcome_of(failures: list[dict[str, Any]]) -> Outcome:
    """Return the outcome that follows from the failures of a trial, the cause first."""
    if not failures:
        return Outcome(TrialStatus.finished)
    kind = failures[0]["kind"]
    return Outcome(TrialStatus(kind) if kind in ("oom", "diverged") else TrialStatus.failed, failures[0]["message"])


@contextmanager
def receiving(job: Job) -> Iterator[Receiver | None]:
    """Receive the files that workers put into object storage, and at the end all of them.

    Yields None if workers write into the trial's folder.

    Raises:
        StorageRefused: see there.
        StorageAway: see there.
    """
    if job.storage is None:
        yield None
        return
    receiver = Receiver(Storage(job.storage), Path(job.folder))
    receiver.begin()
    with receiver.watching():
        try:
            yield receiver
        except Exception:
            with suppress(StorageRefused, StorageAway):  # the error that ended the trial says more
                receiver.receive_all()
            raise
        receiver.receive_all()


def fit(
    job: Job,
    report: Callable[[dict[str, float]], None],
    begins: Callable[[], None] = lambda: None,
    receiver: Receiver | None = None,
) -> None:
    """Train with Ray Train and wait for it. However this ends, the workers and their placement groups are removed.

    Ray Train's controller runs in this process, Tune's own, because another process would import all of Ray Train anew
    for each trial. That needs private names; without them Ray's own controller is used.

    Args:
        job: the trial.
        report: gets `{"epoch": n}` when the folder has the metrics of another epoch.
        begins: called when the workers of an attempt are about to start.
        receiver: of the files that workers put into object storage; None: they use the folder.

    Raises:
        ray.train.TrainingFailedError: workers failed more than `cluster.max_failures` times, or could not be placed
            within `cluster.wait_timeout_s`.
    """
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(job.wait_timeout_s)
    set_environment()
    receive = receiver.receive if receiver else lambda: None
    attempts = Attempts(Path(job.folder), begins, receive)

    def received(metrics: dict[str, float]) -> None:
        with suppress(StorageAway):  # the next report finds it, or the end of the trial
            receive()
        report(metrics)

    try:
        with meeting_folder() as meeting:
            if ray_private.missing():
                fit_by_ray(job, received, attempts, meeting)
            else:
                settings = trainer_settings(job, meeting, job.max_failures, [reporting(received)])
                quick_imports.end()
                ray_private.fit_here(settings, job.folder, attempts, job.workers_per_node, job.ray_is_ours)
    except BaseException:  # Tune ends a trial by SystemExit
        attempts.stop()  # Ray forgets workers that started and then could not make their process group
        raise


def fit_by_ray(job: Job, report: Callable[[dict[str, float]], None], attempts: Attempts, meeting: str) -> None:
    """Train as `fit` does, by Ray Train's public interface only.

    Its controller is a separate process for each attempt, so the rules for another attempt are applied here. Reports of
    the workers are read from the trial's folder.
    """
    from ray.train import TrainingFailedError
    from ray.train.torch import TorchTrainer

    folder, left = Path(job.folder), job.max_failures
    reports = NewReports(folder)
    while True:
        attempts.begin()
        done = in_background(TorchTrainer(**trainer_settings(job, meeting, marks=placement_group_mark(folder))).fit)
        while not wait([done], _LOOK_S).done:
            reports.pass_on(report)
        reports.pass_on(report)
        try:
            done.result()
            return
        except TrainingFailedError as error:
            worth_it = getattr(error, "worker_failures", None) or ray_private.failed_to_start(error)
            if attempts.is_final(error) or not worth_it or left == 0:
                raise
        left -= 1
        attempts.retry()


def trainer_settings(
    job: Job,
    meeting: str,
    max_failures: int = 0,
    callbacks: Sequence[Any] = (),
    marks: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Return the arguments of a `TorchTrainer`.

    Args:
        job: the trial.
        meeting: a folder on this machine for workers that are all on it.
        max_failures: attempts that Ray itself repeats.
        callbacks: of the controller.
        marks: resources of a worker that only identify its trial.
    """
    from ray.train import FailureConfig, RunConfig, ScalingConfig

    return {
        "train_loop_per_worker": train_worker,
        "train_loop_config": job.as_dict(),
        "torch_config": backend_config(job, meeting),
        "scaling_config": ScalingConfig(
            num_workers=job.num_workers,
            use_gpu=job.use_gpu,
            resources_per_worker={**job.each, **(marks or {})},
            placement_strategy=Placement[job.placement].value,
        ),
        "run_config": RunConfig(
            name=".ray_train",
            storage_path=job.folder,
            failure_config=FailureConfig(  # the controller's: workers that were killed while they started
                max_failures=max_failures,
                controller_failure_limit=max_failures,  # type: ignore[call-arg]
            ),
            callbacks=list(callbacks),
        ),
    }


def backend_config(job: Job, meeting: str) -> Any:
    """Return what Ray Train does with workers before they train: they get to know where their ranks meet.

    Ray's own, of PyTorch, would import it in the workers, and make the process group there.
    """
    from ray.train.backend import Backend, BackendConfig

    here = own_node()["node"]
    pytorch = "cpu:gloo,cuda:nccl" if job.use_gpu else "gloo"

    class Meeting(Backend):
        share_cuda_visible_devices = True  # NCCL wants to see the GPUs of all ranks on a node

        def on_start(self, worker_group: Any, backend_config: Any) -> None:
            nodes = write_rank_nodes(Path(job.folder), worker_group)
            arrange_meeting(worker_group, nodes, here, meeting, pytorch, _JOIN_S)

    class Config(BackendConfig):
        backend_cls = Meeting
        backend = pytorch  # as a `TorchConfig` has it

    return Config()


def reporting(report: Callable[[dict[str, float]], None]) -> Any:
    """Return a callback for Ray Train's controller that passes on rank 0's reports."""
    from ray.train import UserCallback

    class Report(UserCallback):
        def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
            report(metrics[0])

    return Report()


class NewReports:
    """The epochs that a trial's folder gets from now on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known = {metrics["epoch"]: metrics for metrics in read_metrics(folder)}

    def pass_on(self, report: Callable[[dict[str, float]], None]) -> None:
        """Report every epoch that was not there the last time, or had other metrics."""
        for metrics in read_metrics(self._folder):
            if self._known.get(metrics["epoch"]) != metrics:
                self._known[metrics["epoch"]] = metrics
                report({"epoch": metrics["epoch"]})


def in_background(work: Callable[[], Any]) -> Future[Any]:
    """Do it in a thread that keeps no process from ending."""
    result: Future[Any] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised again by who asks for the result
            result.set_exception(error)

    threading.Thread(target=run, name="fit", daemon=True).start()
    return result


@contextmanager
def watched(folder: Path, timeout_s: float | None, wait_timeout_s: float) -> Iterator[Callable[[], None]]:
    """End a trial inside that begins no step and no phase for too long, by removing its workers' placement groups.

    Yields a function to call when an attempt begins: before its first step, workers may wait for resources.

    No clock of the trial's is compared with one here, and a second counts only if it was seen to pass: the wall clock
    may be set, and a trial on a suspended machine is not stuck.

    Args:
        folder: the trial's.
        timeout_s: the limit; None: none.
        wait_timeout_s: added before the first step of an attempt.
    """
    done = threading.Event()
    known: dict[str, float] = {}
    started, idle_s, since = False, 0.0, _START

    def begin() -> None:
        nonlocal known, started, idle_s, since
        known, started, idle_s, since = read_progress(folder), False, 0.0, _START

    def look() -> None:
        nonlocal known, started, idle_s, since
        looked = time.monotonic()
        while timeout_s is not None and not done.wait(1.0):
            now = time.monotonic()
            idle_s, looked = idle_s + min(now - looked, _LONGEST_LOOK_S), now
            with suppress(OSError):  # a disk that is away for a moment
                progress = read_progress(folder)
                if progress != known:
                    known, idle_s, since = progress, 0.0, _begun(progress, read_phase(folder))
                    started = started or "step" in progress or "reported" in progress
            if idle_s > (timeout_s if started else timeout_s + wait_timeout_s):
                stuck = find_stuck(folder)
                message = f"no progress for trial_timeout_s={timeout_s:g} s since {since}; it was ended"
                message += f"; {stuck}" if stuck else ""
                write_failure(folder, 0, "timeout", message, "")
                release_placement_group(folder)
                begin()

    begin()
    thread = threading.Thread(target=look, name="watch", daemon=True)
    thread.start()
    try:
        yield begin
    finally:
        done.set()
        thread.join(timeout=10.0)


def _begun(progress: dict[str, float], phase: str | None) -> str:
    if phase is not None:
        return f"{phase} began"
    return f"step {progress['step']:.0f} began" if "step" in progress else _START
