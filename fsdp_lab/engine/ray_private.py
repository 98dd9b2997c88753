"""Every private name of Ray that is used. A Ray that lacks one is refused.

`tests/engine/test_ray_private.py` tries each name.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from fsdp_lab.config import UserError
from fsdp_lab.private import Name

if TYPE_CHECKING:
    from fsdp_lab.engine.attempts import Attempts

SUPPORTED = "2.56 to 2.60"
_ANSWER_S = 4.0

_TRAIN = "ray.train.v2._internal"
_CONTROLLER, _FAILURES = f"{_TRAIN}.execution.controller", f"{_TRAIN}.execution.failure_handling"
_WORKERS = f"{_TRAIN}.execution.worker_group"
NAMES = (
    # Ray Train's controller in the trial's own process
    Name(_CONTROLLER, "TrainController", ("train_run_context", "scaling_policy", "failure_policy")),
    Name(_CONTROLLER, "TrainController.worker_group_cls"),
    Name(_CONTROLLER, "TrainController.run", ("self",)),
    Name(_CONTROLLER, "TrainController.get_result", ("self",)),
    Name(_CONTROLLER, "TrainController.get_worker_group", ("self",)),
    Name("ray.train.v2.api.data_parallel_trainer", "DataParallelTrainer._create_default_callbacks", ("self",)),
    Name(
        "ray.train.v2.api.data_parallel_trainer",
        "DataParallelTrainer._initialize_and_run_controller",
        ("self", "scaling_policy"),
    ),
    Name(f"{_TRAIN}.callbacks.placement_group_callback", "PlacementGroupCleanerCallback"),
    Name(f"{_TRAIN}.callbacks", "DatasetsCallback"),
    # rules for another attempt
    Name(_FAILURES, "DefaultFailurePolicy", ("failure_config",)),
    Name(_FAILURES, "DefaultFailurePolicy.make_decision", ("training_failed_error",)),
    Name(_FAILURES, "FailureDecision.RAISE"),
    Name(_FAILURES, "FailureDecision.RETRY"),
    Name(f"{_TRAIN}.exceptions", "WorkerGroupStartupTimeoutError"),
    Name(f"{_TRAIN}.exceptions", "WorkerGroupStartupFailedError"),
    # workers in a named placement group, in the order of their ranks
    Name(_WORKERS, "WorkerGroupContext", ("num_workers", "resources_per_worker", "placement_strategy")),
    Name(_WORKERS, "WorkerGroup._create_placement_group", ("scaling_config", "worker_group_context")),
    Name(_WORKERS, "WorkerGroup._create_workers", ("num_workers", "placement_group_bundle_indices")),
    Name(_WORKERS, "WorkerGroup._get_worker_runtime_env", ("custom_runtime_env",)),
    Name(_WORKERS, "WorkerGroup.poll_status", ("timeout",)),
    Name(_WORKERS, "WorkerGroup.execute_single_async", ("rank", "fn")),
    Name(f"{_WORKERS}.placement_group_handle", "DefaultPlacementGroupHandle", ("pg",)),
    # Tune's processes from those that Ray keeps ready
    Name("ray.tune.execution.class_cache", "DEFAULT_ENV_VARS"),
    Name("ray.tune.execution.class_cache", "ENV_VARS_TO_PROPAGATE"),
)


def check_version() -> None:
    """Refuse a Ray that trials cannot run on.

    Raises:
        UserError: it lacks one of `NAMES` as it is used here.
    """
    import ray

    if lacking := next((lacks for name in NAMES if (lacks := name.lacks()) is not None), None):
        raise UserError(
            f"Ray {ray.__version__} lacks {lacking}, with which trials run; install a Ray from {SUPPORTED}, or use "
            "engine=inline."
        )


def fit_here(
    settings: dict[str, Any], group_name: str, attempts: Attempts, workers_per_node: int, ray_is_ours: bool
) -> None:
    """Run Ray Train with its controller in this process, which has imported Ray Train already.

    Args:
        settings: of a `DataParallelTrainer`, see `job.trainer_settings`.
        group_name: of the workers' placement groups, with a number for each attempt; any process can free them by it.
        attempts: the rules for another attempt; get `group`.
        workers_per_node: so many, in the order of their ranks, are on one node.
        ray_is_ours: Ray was started here: workers have their environment from the driver.
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
            settings["failure_policy"] = failure_policy(attempts)(self.run_config.failure_config)
            controller = Controller(**settings)
            attempts.group = controller.get_worker_group
            asyncio.run(controller.run())
            return controller.get_result()

    Trainer(**settings).fit()


def worker_group(group_name: str, attempts: Attempts, workers_per_node: int, ray_is_ours: bool) -> Any:
    """Return a class of workers in a named placement group, with several workers to a bundle if they share a node.

    It uses processes that Ray keeps ready: their environment comes from the driver's.
    """
    from ray.train.v2._internal.execution.worker_group import WorkerGroup
    from ray.train.v2._internal.execution.worker_group.placement_group_handle import DefaultPlacementGroupHandle
    from ray.util import placement_group

    numbers = itertools.count()

    class Workers(WorkerGroup):
        def _create_placement_group(self, scaling_config: Any, worker_group_context: Any) -> Any:
            attempts.begin()
            bundle = {
                name: amount * workers_per_node for name, amount in worker_group_context.resources_per_worker.items()
            }
            bundles = [bundle] * (worker_group_context.num_workers // workers_per_node)
            name = f"{group_name}#{os.getpid()}.{next(numbers)}"
            group = placement_group(bundles, worker_group_context.placement_strategy, name=name)
            return DefaultPlacementGroupHandle(group)

        def _create_workers(self, num_workers: int, *args: Any, **settings: Any) -> Any:
            if workers_per_node > 1:
                settings["placement_group_bundle_indices"] = [i // workers_per_node for i in range(num_workers)]
            return super()._create_workers(num_workers, *args, **settings)

        @staticmethod
        def _get_worker_runtime_env(custom_runtime_env: Any) -> Any:
            return {} if ray_is_ours else WorkerGroup._get_worker_runtime_env(custom_runtime_env)

    return Workers


def failure_policy(attempts: Attempts) -> Any:
    """Return Ray's rules for another attempt, after ours.

    A worker that was killed while the trial started counts like one that was killed later. Ray gives up if the worker
    had begun to answer.
    """
    from ray.exceptions import OutOfMemoryError, RayActorError
    from ray.train import WorkerGroupError
    from ray.train.v2._internal.execution.failure_handling import DefaultFailurePolicy, FailureDecision

    class Failures(DefaultFailurePolicy):
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
            group = attempts.group()
            return group.poll_status(timeout_s).errors if group is not None else {}

    return Failures


def ask_ranks(group: Any, question: Callable[[], Any], ranks: Iterable[int]) -> dict[int, Any]:
    """Return what the workers of these ranks answer within some seconds, by rank. Without workers none does."""
    import ray

    answers: dict[int, Any] = {}
    with suppress(Exception):  # they are being started or ended, and Ray's errors then are of many classes
        asked = {group.execute_single_async(rank, question): rank for rank in ranks} if group else {}
        for answer in ray.wait(list(asked), num_returns=len(asked), timeout=_ANSWER_S)[0] if asked else ():
            answers[asked[answer]] = ray.get(answer)
    return answers


def keep_ready_processes() -> None:
    """Stop Tune from passing environment variables to its processes.

    Those of a Ray that was started here are in the environment of all its processes already. Passed again, they would
    form another environment, and the processes that Ray keeps ready could not be used.
    """
    from ray.tune.execution import class_cache

    class_cache.DEFAULT_ENV_VARS.clear()
    class_cache.ENV_VARS_TO_PROPAGATE.clear()
