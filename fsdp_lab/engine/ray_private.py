"""Every private name of Ray that is used, and the behaviour without it.

`tests/engine/test_ray_private.py` tries each name. A Ray that lacks a name in `CONTROLLER` is refused. The entries of
`OTHERS` describe the effect of their absence.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from fsdp_lab.config import UserError
from fsdp_lab.private import Name

SUPPORTED = "2.55 to 2.60"
_TRAIN = "ray.train.v2._internal"


# What it takes to run Ray Train's controller in the trial's own process.
CONTROLLER = (
    Name(
        f"{_TRAIN}.execution.controller", "TrainController", ("train_run_context", "scaling_policy", "failure_policy")
    ),
    Name(f"{_TRAIN}.execution.controller", "TrainController.worker_group_cls"),
    Name(f"{_TRAIN}.execution.controller", "TrainController.run", ("self",)),
    Name(f"{_TRAIN}.execution.controller", "TrainController.get_result", ("self",)),
    Name(f"{_TRAIN}.execution.controller", "TrainController.get_worker_group", ("self",)),
    Name(f"{_TRAIN}.execution.failure_handling", "DefaultFailurePolicy", ("failure_config",)),
    Name(f"{_TRAIN}.execution.failure_handling", "DefaultFailurePolicy.make_decision", ("training_failed_error",)),
    Name(f"{_TRAIN}.execution.failure_handling", "FailureDecision.RAISE"),
    Name(f"{_TRAIN}.execution.failure_handling", "FailureDecision.RETRY"),
    Name(f"{_TRAIN}.execution.scaling_policy", "FixedScalingPolicy", ("scaling_config",)),
    Name(
        f"{_TRAIN}.execution.worker_group",
        "WorkerGroupContext",
        ("num_workers", "resources_per_worker", "placement_strategy"),
    ),
    Name(
        f"{_TRAIN}.execution.worker_group",
        "WorkerGroup._create_placement_group",
        ("scaling_config", "worker_group_context"),
    ),
    Name(f"{_TRAIN}.execution.worker_group", "WorkerGroup._get_worker_runtime_env", ("custom_runtime_env",)),
    Name(f"{_TRAIN}.execution.worker_group", "WorkerGroup.poll_status", ("timeout",)),
    Name(f"{_TRAIN}.execution.worker_group", "WorkerGroup.execute_single_async", ("rank", "fn")),
    Name(f"{_TRAIN}.execution.worker_group.placement_group_handle", "DefaultPlacementGroupHandle", ("pg",)),
    Name("ray.train.v2.api.data_parallel_trainer", "DataParallelTrainer._create_default_callbacks", ("self",)),
    Name(
        "ray.train.v2.api.data_parallel_trainer",
        "DataParallelTrainer._initialize_and_run_controller",
        ("self", "scaling_policy"),
    ),
)
_ANSWER_S = 10.0
_NO_PLACE, _NO_START = "WorkerGroupStartupTimeoutError", "WorkerGroupStartupFailedError"
# Without it the ranks of a shard group may be on several nodes.
_SHARED_BUNDLES = (
    Name(
        f"{_TRAIN}.execution.worker_group",
        "WorkerGroup._create_workers",
        ("num_workers", "placement_group_bundle_indices"),
    ),
)
# Without it nobody is told of nodes that are draining.
_DRAINING = (Name("ray._private.state", "GlobalState.get_draining_nodes", ("self",)),)
# Without it a sweep ends, to be resumed, when Ray kills the process that Tune waits in for want of host memory.
_MEMORY_KILLS = (
    Name("ray.air.execution._internal", "RayActorManager._actor_task_failed", ("tracked_actor_task", "exception")),
)
# Without it, of trials that end at the same time, one keeps its process for the next trial; the others' start anew.
_TRIAL_PROCESSES = (
    Name("ray.tune.execution.tune_controller", "TuneController._maybe_reuse_cached_actor", ("self", "trial")),
    Name("ray.tune.utils.object_cache", "_ObjectCache.cache_object", ("self", "key", "obj")),
    Name("ray.tune.utils.object_cache", "_ObjectCache.increase_max", ("self", "key", "by")),
    Name("ray.tune.execution.tune_controller", "_ObjectCache"),
)
# Of a driver that `ray job submit` started: a variable that says so, and the folder of the files that it came with.
# Without them such a sweep runs as one that is typed on the head node.
JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
RUNTIME_ENV_FOLDER = "runtime_resources"
_JOB = (
    Name("ray._private.runtime_env.constants", "RAY_JOB_CONFIG_JSON_ENV_VAR"),
    Name("ray._private.ray_constants", "DEFAULT_RUNTIME_ENV_DIR_NAME"),
)
# Without these something is slower, or one more line is printed; nothing fails.
OTHERS = (
    # 2.54 has a policy that asks no coordinator; there is nothing to leave out
    Name(f"{_TRAIN}.execution.scaling_policy", "FixedScalingPolicy._maybe_send_resource_request", ("self",)),
    Name(f"{_TRAIN}.execution.scaling_policy", "FixedScalingPolicy.after_controller_start", ("train_run_context",)),
    Name(f"{_TRAIN}.execution.scaling_policy", "FixedScalingPolicy.before_controller_shutdown", ("self",)),
    # one more process for each trial
    Name(f"{_TRAIN}.callbacks.placement_group_callback", "PlacementGroupCleanerCallback"),
    Name(f"{_TRAIN}.callbacks", "DatasetsCallback"),
    # by its name: workers that found no place are not tried again
    Name(f"{_TRAIN}.exceptions", "WorkerGroupStartupTimeoutError"),
    Name(f"{_TRAIN}.exceptions", "WorkerGroupStartupFailedError"),
    *_SHARED_BUNDLES,
    *_DRAINING,
    *_MEMORY_KILLS,
    *_TRIAL_PROCESSES,
    *_JOB,
    # without it the driver prints a paragraph about each killed worker
    Name("ray._private.worker", "print_to_stdstream", ("data", "ignore_prefix")),
    # Tune's processes start anew instead of coming from those that Ray keeps ready
    Name("ray.tune.execution.class_cache", "DEFAULT_ENV_VARS"),
    Name("ray.tune.execution.class_cache", "ENV_VARS_TO_PROPAGATE"),
    # Tune prints a line for a trial that ended without a report
    Name("ray.tune.progress_reporter", "TrialProgressCallback._print", ("self", "msg")),
)


def missing(names: Sequence[Name] = CONTROLLER) -> list[str]:
    """Return the names that this Ray does not have as they are used here."""
    return [lacking for name in names if (lacking := name.lacks()) is not None]


def check_version() -> None:
    """Refuse a Ray that trials cannot run on.

    Raises:
        UserError: it lacks a name in `CONTROLLER`.
    """
    if lacking := missing():
        import ray

        raise UserError(
            f"Ray {ray.__version__} lacks {lacking[0]}, with which trials run; install a Ray from {SUPPORTED}, or use "
            "engine=inline."
        )


class Rules(Protocol):
    """The rules for the attempts of a trial: see `attempts.Attempts`."""

    def begin(self) -> None:
        """See `Attempts.begin`."""

    def is_final(self, error: Exception, poll: Callable[[float], dict[int, Exception]]) -> bool:
        """See `Attempts.is_final`."""

    def retry(self) -> None:
        """See `Attempts.retry`."""


class Watcher(Protocol):
    """Watches the workers of a trial: see `job.Watch`."""

    group: Callable[[], Any]


def fit_here(
    settings: dict[str, Any],
    group_name: str,
    attempts: Rules,
    watch: Watcher,
    workers_per_node: int,
    ray_is_ours: bool,
) -> None:
    """Run `TorchTrainer(**settings)` with its controller in this process, which has imported Ray Train already.

    Its base class does all of it, and does not import PyTorch.

    Args:
        settings: see `job.trainer_settings`.
        group_name: of the workers' placement groups, with a number for each attempt; any process can free them by it.
        attempts: the rules for another attempt.
        watch: gets `group`, which returns the worker group.
        workers_per_node: so many, in the order of their ranks, are on one node.
        ray_is_ours: Ray was started here: there is no autoscaler, and workers have their environment from the driver.
    """
    from ray.train.v2._internal.execution.controller import TrainController
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    class Controller(TrainController):
        worker_group_cls = worker_group(group_name, attempts, workers_per_node, ray_is_ours)

    class Trainer(DataParallelTrainer):
        def _create_default_callbacks(self) -> list[Any]:
            """Drop two callbacks that start another process for each trial.

            They are Ray's placement-group cleaner, which needs a dashboard, and the manager of Ray's data sets, which
            are not used.
            """
            callbacks = super()._create_default_callbacks()
            return [
                c for c in callbacks if type(c).__name__ not in ("PlacementGroupCleanerCallback", "DatasetsCallback")
            ]

        def _initialize_and_run_controller(self, **settings: Any) -> Any:
            failures = failure_policy(attempts)(self.run_config.failure_config)
            settings["failure_policy"] = failures
            if ray_is_ours:
                settings["scaling_policy"] = no_autoscaler()(self.scaling_config)
            controller = Controller(**settings)
            failures.group = controller.get_worker_group
            watch.group = controller.get_worker_group
            asyncio.run(controller.run())
            return controller.get_result()

    backend = settings["torch_config"]
    Trainer(**{name: value for name, value in settings.items() if name != "torch_config"}, backend_config=backend).fit()


def worker_group(group_name: str, attempts: Rules, workers_per_node: int, ray_is_ours: bool) -> Any:
    """Return a class of workers in a named placement group, with several workers to a bundle if they share a node.

    It uses processes that Ray keeps ready: their environment comes from the driver's.
    """
    from ray.train.v2._internal.execution.worker_group import WorkerGroup
    from ray.train.v2._internal.execution.worker_group.placement_group_handle import DefaultPlacementGroupHandle
    from ray.util import placement_group

    numbers = itertools.count()
    together = 1 if missing(_SHARED_BUNDLES) else workers_per_node

    class Workers(WorkerGroup):
        def _create_placement_group(self, scaling_config: Any, worker_group_context: Any) -> Any:
            attempts.begin()
            bundle = {name: amount * together for name, amount in worker_group_context.resources_per_worker.items()}
            bundles = [bundle] * (worker_group_context.num_workers // together)
            name = f"{group_name}#{os.getpid()}.{next(numbers)}"
            group = placement_group(bundles, worker_group_context.placement_strategy, name=name)
            return DefaultPlacementGroupHandle(group)

        def _create_workers(self, num_workers: int, *args: Any, **settings: Any) -> Any:
            if together > 1:
                settings["placement_group_bundle_indices"] = [i // together for i in range(num_workers)]
            return super()._create_workers(num_workers, *args, **settings)

        @staticmethod
        def _get_worker_runtime_env(custom_runtime_env: Any) -> Any:
            return {} if ray_is_ours else WorkerGroup._get_worker_runtime_env(custom_runtime_env)

    return Workers


def failure_policy(attempts: Rules) -> Any:
    """Return Ray's rules for another attempt, after ours. Its objects get `group`, which returns the worker group.

    A worker that was killed while the trial started counts like one that was killed later. Ray gives up if the worker
    had begun to answer.
    """
    from ray.exceptions import OutOfMemoryError, RayActorError
    from ray.train import WorkerGroupError
    from ray.train.v2._internal.execution.failure_handling import DefaultFailurePolicy, FailureDecision

    class Failures(DefaultFailurePolicy):
        group: Callable[[], Any]

        def make_decision(self, training_failed_error: Any) -> Any:
            if attempts.is_final(training_failed_error, self._poll):
                return FailureDecision.RAISE
            counted = training_failed_error
            failure = getattr(counted, "controller_failure", None)
            if isinstance(failure, (RayActorError, OutOfMemoryError)):
                counted = WorkerGroupError(str(counted), {0: failure})
            decision = super().make_decision(counted)
            if decision is FailureDecision.RETRY:
                attempts.retry()
            return decision

        def _poll(self, timeout_s: float) -> dict[int, Exception]:
            return self.group().poll_status(timeout_s).errors if self.group() is not None else {}

    return Failures


def no_autoscaler() -> Any:
    """Do without the coordinator of autoscaling, a process that is slow to start, in a Ray that was started here."""
    from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy

    class NoAutoscaler(FixedScalingPolicy):
        def _maybe_send_resource_request(self) -> None:
            pass

        def after_controller_start(self, train_run_context: Any) -> None:
            pass

        async def before_controller_shutdown(self) -> None:
            pass

    return NoAutoscaler


def ask_first_rank(group: Any, question: Callable[[], Any]) -> Any:
    """Return what rank 0's worker answers; None without workers, or if it does not answer within some seconds."""
    import ray

    if group is None:
        return None
    try:
        return ray.get(group.execute_single_async(0, question), timeout=_ANSWER_S)
    except (ray.exceptions.RayError, ValueError):  # they are being started or ended, or one is stuck
        return None


def session_folder() -> str | None:
    """Return the folder of this node's Ray for temporary files, which goes with Ray; None: not known."""
    from ray._private import worker

    node = getattr(worker, "_global_node", None)
    return node.get_session_dir_path() if node is not None else None


def failed_to_be_placed(error: Exception) -> bool:
    """Whether workers waited for their places as long as they may, and there were none."""
    return type(getattr(error, "controller_failure", None)).__name__ == _NO_PLACE


def failed_to_start(error: Exception) -> bool:
    """Return whether workers ended after they were created and before they trained."""
    from ray.exceptions import OutOfMemoryError, RayActorError

    failure = getattr(error, "controller_failure", None)
    return type(failure).__name__ == _NO_START or isinstance(failure, (RayActorError, OutOfMemoryError))


def draining_nodes() -> set[str]:
    """Return the ids of nodes that are about to be removed; empty if this Ray does not report them."""
    if missing(_DRAINING):
        return set()
    import ray

    return set(ray._private.state.state.get_draining_nodes())


def keep_ready_processes() -> None:
    """Stop Tune from passing environment variables to its processes.

    Those of a Ray that was started here are in the environment of all its processes already. Passed again, they would
    form another environment, and the processes that Ray keeps ready could not be used.
    """
    if missing([name for name in OTHERS if name.module == "ray.tune.execution.class_cache"]):
        return
    from ray.tune.execution import class_cache

    class_cache.DEFAULT_ENV_VARS.clear()
    class_cache.ENV_VARS_TO_PROPAGATE.clear()


def keep_trial_processes(count: int) -> None:
    """Let Tune keep this many processes of ended trials for the next ones.

    Tune keeps one, and another for each trial that waits for a process. Our trials wait in the sweep's own queue.

    Tune also gives a process that becomes free to a trial whose own process is starting, and ends the latter. If trials
    end as quickly as processes start, there are never enough of them. So that trial waits, and the next one takes the
    free process.
    """
    if missing(_TRIAL_PROCESSES):
        return
    from ray.tune.execution import tune_controller
    from ray.tune.utils.object_cache import _ObjectCache

    class Processes(_ObjectCache):  # not of what an earlier sweep of this process has put there
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            self.wanted: set[Any] = set()

        def cache_object(self, key: Any, obj: Any) -> bool:
            if key not in self.wanted:
                self.wanted.add(key)
                self.increase_max(key, count)
            return bool(super().cache_object(key, obj))

    tune_controller._ObjectCache = Processes  # type: ignore[misc]

    as_it_is = tune_controller.TuneController._maybe_reuse_cached_actor
    if getattr(as_it_is, "lets_processes_start", False):
        return

    def reuse(self: Any, trial: Any) -> bool:
        starts = trial in self._trial_to_actor and trial not in self._resetting_trials
        return not starts and as_it_is(self, trial)

    reuse.lets_processes_start = True  # type: ignore[attr-defined]
    tune_controller.TuneController._maybe_reuse_cached_actor = reuse  # type: ignore[method-assign]


def survive_memory_kills() -> None:
    """Let Tune handle a process that Ray killed for lack of host memory like any other killed process.

    Tune knows two kinds of errors, of an actor and of its task. `OutOfMemoryError` is neither, and ends the sweep.
    """
    if missing(_MEMORY_KILLS):
        return
    from ray.air.execution._internal import RayActorManager
    from ray.exceptions import OutOfMemoryError, RayActorError

    as_it_is = RayActorManager._actor_task_failed
    if getattr(as_it_is, "survives_memory_kills", False):
        return

    def task_failed(self: Any, tracked_actor_task: Any, exception: Exception) -> None:
        if isinstance(exception, OutOfMemoryError):
            killed = RayActorError()
            killed.__cause__ = exception
            exception = killed
        as_it_is(self, tracked_actor_task, exception)

    task_failed.survives_memory_kills = True  # type: ignore[attr-defined]
    RayActorManager._actor_task_failed = task_failed  # type: ignore[method-assign]


def quiet_worker_deaths() -> None:
    """Stop Ray from printing a paragraph about each killed worker: the trial's error is one line."""
    from ray._private import worker

    worker.print_to_stdstream = lambda data, ignore_prefix: None


def quiet_tune() -> list[Any]:
    """Return callbacks that replace Tune's own, which prints a line for a trial that ended without a report."""
    try:
        from ray.tune.progress_reporter import TrialProgressCallback
    except ImportError:
        return []

    class NoTuneLines(TrialProgressCallback):
        def _print(self, msg: str) -> None:
            pass

    return [NoTuneLines()]
