"""A trial as a Ray Train job, run in a process of Ray Tune's."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fsdp_lab.engine.cluster import remove_places, set_environment, worker_resources
from fsdp_lab.engine.files import (
    Outcome,
    read_failures,
    read_progress,
    set_aside_failures,
    wait_until_alone,
    write_outcome,
)
from fsdp_lab.engine.worker import write_failure

_ALONE_LIMIT_S = 60.0  # for the processes of a run that was killed: Ray takes some seconds to see that it died
_PEER_S = 1.0
_TAIL_LINES = 50  # of a log, for the report of a failure
_FINAL = ("oom", "timeout", "user")  # it would be so again


@dataclass(frozen=True)
class Job:
    """What a trial's processes are given. Plain values only: it crosses process borders.

    `config` is `to_dict` of the trial's; `num_workers` and `cpus_per_worker` are what its keys of these names stand
    for; `folder` is seen by every node; `launched_in` is where the command was typed, so that relative paths mean the
    same in every process.
    """

    config: dict[str, Any]
    folder: str
    num_workers: int
    cpus_per_worker: float
    use_gpu: bool
    launched_in: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def trial_function(config: dict[str, Any]) -> None:
    """What Ray Tune calls: one trial, by its job. Tune ends it from within a report, by SystemExit."""
    from ray import tune

    run_job(Job(**json.loads(config["job"])), tune.report)


def run_job(job: Job, report: Callable[[dict[str, float]], None]) -> None:
    """Train to the end, restarts included; leaves `outcome.json` in the trial's folder, whatever happens.

    Only a disk that is full or away keeps it from that: the driver finds no outcome, and looks at the disk.

    Args:
        report: told the metrics of every epoch, and not to be called after it has raised.
    """
    folder, begun = Path(job.folder), time.time()
    try:
        if not wait_until_alone(folder, _ALONE_LIMIT_S):
            raise TimeoutError(f"another run's processes still work in {folder} after {_ALONE_LIMIT_S:.0f} s; end them")
        set_aside_failures(folder)  # of a start before this one
        with watched(folder, job.config["trial_timeout_s"], job.config["cluster"]["wait_timeout_s"]) as begins:
            fit(job, report, begins)
        outcome = outcome_of(read_failures(folder))
    except Exception as error:  # noqa: BLE001 - any end of the job is a result of the trial
        with suppress(OSError):
            (folder / "error.txt").write_text(report_of(folder, error))
        outcome = outcome_of(read_failures(folder) or [{"kind": "error", "message": first_line(error)}])
    with suppress(OSError):
        write_outcome(folder, Outcome(outcome.status, outcome.error, time.time() - begun))


def outcome_of(failures: list[dict[str, Any]]) -> Outcome:
    """What the failures of a trial, the cause first, make of it."""
    if not failures:
        return Outcome("finished")
    kind = failures[0]["kind"]
    return Outcome(kind if kind in ("oom", "diverged") else "failed", failures[0]["message"])


def fit(job: Job, report: Callable[[dict[str, float]], None], begins: Callable[[], None] = lambda: None) -> None:
    """Build the `TorchTrainer` and wait for it.

    Ray Train's controller runs here, in Tune's own process, and not in one more: it would import all of Ray Train
    anew for each trial. However this is left, the workers and their places are gone afterwards.

    Args:
        report: told the metrics of every epoch.
        begins: called when the workers of an attempt are about to start.

    Raises:
        ray.train.TrainingFailedError: workers failed more than `cluster.max_failures` times, or could not be
            placed within `cluster.wait_timeout_s`.
    """
    cluster = job.config["cluster"]
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(cluster["wait_timeout_s"])
    set_environment()
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer
    from ray.train.torch.config import _TorchBackend
    from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError
    from ray.train.v2._internal.execution.controller import TrainController
    from ray.train.v2._internal.execution.failure_handling import DefaultFailurePolicy, FailureDecision
    from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy
    from ray.train.v2._internal.execution.worker_group import WorkerGroup
    from ray.train.v2._internal.execution.worker_group.placement_group_handle import DefaultPlacementGroupHandle
    from ray.train.v2.api.callback import UserCallback
    from ray.util import placement_group

    from fsdp_lab.engine.worker import check_gpu, train_worker

    folder = Path(job.folder)
    attempts, kernel_kills_before = itertools.count(), _kernel_kills()

    class Workers(WorkerGroup):
        """In a placement group with a name, by which anybody can free it; and in processes that Ray keeps ready:
        what it would hand over as their environment they have from the driver's."""

        def _create_placement_group(self, scaling_config: Any, context: Any) -> Any:
            begins()
            bundles = [context.resources_per_worker] * context.num_workers
            name = f"{job.folder}#{os.getpid()}.{next(attempts)}"
            return DefaultPlacementGroupHandle(placement_group(bundles, context.placement_strategy, name=name))

        @staticmethod
        def _get_worker_runtime_env(custom_runtime_env: Any) -> Any:
            return {} if cluster["address"] is None else WorkerGroup._get_worker_runtime_env(custom_runtime_env)

    class Failures(DefaultFailurePolicy):
        group: Callable[[], Any]

        def make_decision(self, training_failed_error: Any) -> Any:
            note_deaths(folder, getattr(training_failed_error, "worker_failures", {}), kernel_kills_before)
            failures = read_failures(folder)
            if failures and failures[0]["kind"] == "peer" and self.group() is not None:
                # Who lost a peer knows it at once; that the peer was killed, and for want of what, takes Ray a moment.
                time.sleep(_PEER_S)
                note_deaths(folder, self.group().poll_status(_PEER_S).errors, kernel_kills_before)
                failures = read_failures(folder)
            if failures and failures[0]["kind"] in _FINAL:
                return FailureDecision.RAISE
            if isinstance(getattr(training_failed_error, "controller_failure", None), WorkerGroupStartupTimeoutError):
                return FailureDecision.RAISE  # there is no place for them, and there was none for a long time
            decision = super().make_decision(training_failed_error)
            if decision is FailureDecision.RETRY:
                set_aside_failures(folder)
            return decision

    class NoAutoscaler(FixedScalingPolicy):
        """For a Ray that was started here: the coordinator of autoscaling is one more process, slow to start."""

        def _maybe_send_resource_request(self) -> None:
            pass

        def after_controller_start(self, train_run_context: Any) -> None:
            pass

        async def before_controller_shutdown(self) -> None:
            pass

    class Controller(TrainController):
        worker_group_cls = Workers

    class Trainer(TorchTrainer):
        def _create_default_callbacks(self) -> list[Any]:
            """Without two that start one more process for each trial: Ray's placement-group cleaner, which asks a
            dashboard that is not there, and the manager of Ray's data sets, of which there are none."""
            callbacks = super()._create_default_callbacks()  # type: ignore[misc]
            return [
                c for c in callbacks if type(c).__name__ not in ("PlacementGroupCleanerCallback", "DatasetsCallback")
            ]

        def _initialize_and_run_controller(self, **settings: Any) -> Any:
            settings["failure_policy"] = failures = Failures(self.run_config.failure_config)  # type: ignore[arg-type]
            if cluster["address"] is None:
                settings["scaling_policy"] = NoAutoscaler(self.scaling_config)  # type: ignore[arg-type]
            controller = Controller(**settings)
            failures.group = controller.get_worker_group
            try:
                asyncio.run(controller.run())
                return controller.get_result()
            finally:
                if controller.get_worker_group() is not None:  # stopped by Tune, in the middle of a report
                    remove_places(folder)

    class Backend(_TorchBackend):
        def on_start(self, worker_group: Any, backend_config: Any) -> None:
            """With a look at the GPUs first: without one NCCL fails here, before our code on the workers is called."""
            if job.use_gpu:
                ranks = range(len(worker_group))
                ray.get([worker_group.execute_single_async(rank, check_gpu, job.folder, rank) for rank in ranks])
            super().on_start(worker_group, backend_config)

    class Torch(TorchConfig):
        backend_cls = Backend

    class Report(UserCallback):
        def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
            report(metrics[0])

    trainer = Trainer(
        train_worker,
        train_loop_config=job.as_dict(),
        torch_config=Torch(backend="cpu:gloo,cuda:nccl" if job.use_gpu else "gloo"),
        scaling_config=ScalingConfig(
            num_workers=job.num_workers,
            use_gpu=job.use_gpu,
            resources_per_worker=worker_resources(job.cpus_per_worker, job.use_gpu),
        ),
        run_config=RunConfig(
            name=".ray_train",
            storage_path=job.folder,
            failure_config=FailureConfig(  # the controller's: workers that were killed while they started
                max_failures=cluster["max_failures"],
                controller_failure_limit=cluster["max_failures"],  # type: ignore[call-arg]
            ),
            callbacks=[Report()],  # type: ignore[list-item]
        ),
    )
    trainer.fit()


def note_deaths(folder: Path, worker_failures: dict[int, Exception], kernel_kills_before: int) -> None:
    """Write down the ranks that ended without a word: killed by a person, by Ray for want of memory, by the kernel."""
    for rank, error in worker_failures.items():
        if (folder / "failures" / f"rank{rank}.json").exists():
            continue
        step = read_progress(folder).get("step")
        where = f"rank {rank}" + (f", step {step:.0f}" if step else "")
        causes = (error, getattr(error, "health_check_failure", None), error.__cause__)
        by_ray = any(type(cause).__name__ == "OutOfMemoryError" for cause in causes)
        out_of_memory = by_ray or _kernel_kills() > kernel_kills_before
        why = "was killed for want of host memory" if out_of_memory else "ended without a word, as one that is killed"
        text = "".join(traceback.format_exception(error))
        write_failure(folder, rank, "oom" if out_of_memory else "killed", f"{where}: its process {why}", text)


def _kernel_kills() -> int:
    """How often the kernel has killed for want of memory; a machine that does not count says 0."""
    with suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


@contextmanager
def watched(folder: Path, timeout_s: float | None, wait_timeout_s: float) -> Iterator[Callable[[], None]]:
    """End a trial inside that takes no step for so long, by taking its workers' places away. Before the first step of
    an attempt they may have waited for these. Gives what is to be called when an attempt begins."""
    done = threading.Event()
    begun = time.time()

    def begin() -> None:
        nonlocal begun
        begun = time.time()

    def look() -> None:
        while timeout_s is not None and not done.wait(1.0):
            progress = read_progress(folder)
            started = progress.get("time", 0.0) > begun
            last, limit = (progress["time"], timeout_s) if started else (begun, timeout_s + wait_timeout_s)
            if time.time() - last > limit:
                since = f"step {progress['step']:.0f} began" if started else "its start"
                message = f"no progress for trial_timeout_s={timeout_s:g} s since {since}; it was ended"
                write_failure(folder, 0, "timeout", message, "")
                remove_places(folder)
                begin()

    thread = threading.Thread(target=look, name="watch", daemon=True)
    thread.start()
    try:
        yield begin
    finally:
        done.set()
        thread.join(timeout=10.0)


def report_of(folder: Path, error: Exception) -> str:
    """The traceback of the rank that failed first, or the job's own where no rank says more, and the end of its log."""
    failures = read_failures(folder)
    text = (failures[0]["traceback"] if failures else "") or "".join(traceback.format_exception(error))
    log = folder / "logs" / f"rank{failures[0]['rank'] if failures else 0}.log"
    lines = log.read_text(errors="replace").splitlines()[-_TAIL_LINES:] if log.exists() else []
    return "\n".join([text, f"--- the end of {log.relative_to(folder)} ---", *lines, ""])


def first_line(error: BaseException) -> str:
    """The last line of an error that says something, cut to what fits a table."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:300]
