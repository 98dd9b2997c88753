"""Worker processes for the next trial that have imported PyTorch already: `cluster.early_imports`.

A worker's imports take seconds, and Ray starts its process only when a trial asks for it. A Ray that is started here
imports `MODULES` into each process before it asks for work (`RAY_preload_python_modules`). `SpareWorkers` makes Ray
start such processes while a trial trains: it submits tasks that need no core, and cancels them before their processes
are there. Ray keeps the processes for the workers of the next trial. Should a Ray not do so, workers start as ever.

The imports slow down the trial that trains where cores are scarce (`python -m benchmarks.turnaround`).
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import Any

# What every worker imports, whatever its trial: nothing here may ask CUDA for its devices, because Ray sets a worker's
# `CUDA_VISIBLE_DEVICES` later.
MODULES = (
    "fsdp_lab.engine.worker_start",
    "ray.train.torch",
    "torchvision.models",
    "fsdp_lab.training",
    "fsdp_lab.engine.rank",
)
_PRELOAD = "RAY_preload_python_modules"
_BEFORE_CANCEL_S = 0.3  # for Ray to ask for the processes; they take longer to start
_IDLE = "ray::IDLE"  # the title of a process that waits for work

_before: dict[str, str | None] = {}  # the variables that `set_environment` set -> their values before


def set_environment(num_workers: int) -> None:
    """Set the environment variables by which a Ray that is about to start keeps spare workers.

    Args:
        num_workers: of a trial.
    """
    ours = {
        _PRELOAD: ",".join(MODULES),
        "RAY_num_workers_soft_limit": str(2 * num_workers + 2),  # one trial's, the next one's, and Tune's own
        "RAY_prestart_worker_first_driver": "0",  # else Ray starts one for each core
    }
    for name, value in ours.items():
        _before.setdefault(name, os.environ.get(name))
        os.environ[name] = value


def restore_environment() -> None:
    """Undo `set_environment`; another sweep of this process may want no spare workers."""
    while _before:
        name, value = _before.popitem()
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def has_imported_early() -> bool:
    """Return whether this process is of a Ray with spare workers."""
    return MODULES[-1] in os.environ.get(_PRELOAD, "").split(",")


class SpareWorkers:
    """Prepares the workers of the next trial, once for each trial that begins."""

    def __init__(self) -> None:
        self._tasks: list[Any] = []
        self.wanted = bool(_before)

    def begin(self) -> None:
        """Note that a trial begins, with the workers that are there."""
        self.wanted = bool(_before)
        self._end_used()

    def prepare(self, count: int) -> None:
        """Make Ray start the processes that lack to so many; they take seconds."""
        import ray

        @ray.remote(num_cpus=0, max_retries=0)
        def process() -> int:
            return os.getpid()

        self.wanted = False
        self._tasks = [process.remote() for _ in range(count - len(idle_processes()))]
        time.sleep(_BEFORE_CANCEL_S)
        for task in self._tasks:
            ray.cancel(task)

    def _end_used(self) -> None:
        """End processes whose task was cancelled too late: Ray gives no worker a process that has run a task."""
        import psutil
        import ray

        for task in self._tasks:
            with suppress(ray.exceptions.RayError, psutil.Error):  # it was cancelled, as it should
                if (pid := ray.get(task, timeout=0)) in idle_processes():
                    psutil.Process(pid).kill()
        self._tasks = []


def idle_processes() -> set[int]:
    """Return the ids of the processes that Ray, which was started here, keeps ready."""
    import psutil  # here: a worker imports this module, and needs PyTorch and Ray alone

    found = set()
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if child.cmdline()[:1] == [_IDLE]:
                found.add(child.pid)
    return found
