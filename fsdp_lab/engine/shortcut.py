"""A faster path through Ray Train that uses private names of Ray; no other file uses any.

Ray Train's controller runs in the trial's own process instead of a new one, and workers are processes that Ray keeps
ready. It saves seconds per trial. If Ray lacks a name, trials use the public `DataParallelTrainer.fit`. Set
FSDP_LAB_PUBLIC_RAY=1 to try that.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from fsdp_lab.machine.private import Name

_TRAINER, _EXECUTION = "ray.train.v2.api.data_parallel_trainer", "ray.train.v2._internal.execution"
NAMES = (
    Name(_TRAINER, "DataParallelTrainer._create_default_callbacks", ("self",)),
    Name(_TRAINER, "DataParallelTrainer._initialize_and_run_controller", ("self", "scaling_policy")),
    Name("ray.train.v2._internal.callbacks.placement_group_callback", "PlacementGroupCleanerCallback"),
    Name("ray.train.v2._internal.callbacks", "DatasetsCallback"),
    Name(f"{_EXECUTION}.controller", "TrainController", ("train_run_context", "scaling_policy", "failure_policy")),
    Name(f"{_EXECUTION}.controller", "TrainController.worker_group_cls"),
    Name(f"{_EXECUTION}.controller", "TrainController.run", ("self",)),
    Name(f"{_EXECUTION}.controller", "TrainController.get_result", ("self",)),
    Name(f"{_EXECUTION}.worker_group", "WorkerGroup._get_worker_runtime_env", ("custom_runtime_env",)),
    Name("ray.tune.execution.class_cache", "DEFAULT_ENV_VARS"),
    Name("ray.tune.execution.class_cache", "ENV_VARS_TO_PROPAGATE"),
)


def unusable() -> str | None:
    """Return why trials do not use this path; None: they do."""
    if os.environ.get("FSDP_LAB_PUBLIC_RAY"):
        return "FSDP_LAB_PUBLIC_RAY is set"
    lacking = next((lacks for name in NAMES if (lacks := name.lacks()) is not None), None)
    return lacking and f"this Ray lacks {lacking}"


def trainer_class(ray_is_ours: bool) -> Any:
    """Return a `DataParallelTrainer` whose controller runs in this process.

    Args:
        ray_is_ours: Ray was started by the driver, so that all its processes have the driver's environment.
    """
    from ray.train.v2._internal.execution.controller import TrainController
    from ray.train.v2._internal.execution.worker_group import WorkerGroup
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    class Workers(WorkerGroup):
        @staticmethod
        def _get_worker_runtime_env(custom_runtime_env: Any) -> Any:
            return {} if ray_is_ours else WorkerGroup._get_worker_runtime_env(custom_runtime_env)

    class Controller(TrainController):
        worker_group_cls = Workers

    class Trainer(DataParallelTrainer):
        def _create_default_callbacks(self) -> list[Any]:
            """Drop two callbacks that start another process per trial and are not needed."""
            dropped = ("PlacementGroupCleanerCallback", "DatasetsCallback")
            return [each for each in super()._create_default_callbacks() if type(each).__name__ not in dropped]

        def _initialize_and_run_controller(self, **settings: Any) -> Any:
            controller = Controller(**settings)
            asyncio.run(controller.run())
            return controller.get_result()

    return Trainer


def keep_ready_processes() -> None:
    """Stop Tune from passing environment variables to its processes, which have them from a Ray that is ours.

    Passing them again would define another environment, and Ray could not use the processes that it keeps ready.
    """
    from ray.tune.execution import class_cache

    class_cache.DEFAULT_ENV_VARS.clear()
    class_cache.ENV_VARS_TO_PROPAGATE.clear()
