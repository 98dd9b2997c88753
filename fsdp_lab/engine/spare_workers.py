"""Worker processes for the next trial that have imported PyTorch already, where cores are free.

A worker's imports take seconds, and Ray starts its process only when a trial asks for it. A Ray that is started here
imports `MODULES` into each process before it asks for work (`RAY_preload_python_modules`). `SpareWorkers.start` makes
Ray start such processes: it submits tasks that need no core, and cancels them before their processes are there. Ray
keeps the processes for the workers of the next trial.

Without free cores the imports would slow down the trial that trains, so nothing is prepared
(`python -m benchmarks.turnaround`).
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import Any

import psutil

# What every worker imports, whatever its trial: nothing here may ask CUDA for its devices, because Ray sets a worker's
# `CUDA_VISIBLE_DEVICES` later.
MODULES = ("ray.train.torch", "torchvision.models", "fsdp_lab.training", "fsdp_lab.engine.worker")
_MODULES, _LIMIT = "RAY_preload_python_modules", "RAY_num_workers_soft_limit"
_FIRST = "RAY_prestart_worker_first_driver"
_MEMORY = 2**30  # bytes of host memory that one takes; on a CPU 0.85 GiB are resident, most of it shared
_LOOK_S = 1.0  # at the cores
RESERVE = 2  # cores for Ray and the driver
_MOST_SIDE_BY_SIDE = 8  # trials: Tune's process for each imports the modules, too
_BEFORE_CANCEL_S = 0.3  # for Ray to ask for the processes; they take longer to start


_kept = False  # by the Ray that was started here


def set_environment(cpus: int, gpus: int, num_workers: int, cpus_per_worker: float) -> None:
    """Set the environment variables by which a Ray that is about to start keeps spare workers, if cores are free.

    Args:
        cpus: of this machine.
        gpus: of this machine.
        num_workers: of a trial.
        cpus_per_worker: of a trial.
    """
    global _kept
    side_by_side = gpus // num_workers if gpus else int(cpus // (num_workers * cpus_per_worker))
    busy = max(1, side_by_side) * num_workers  # each worker that trains keeps a core busy
    few = side_by_side <= _MOST_SIDE_BY_SIDE and _MODULES not in os.environ
    _kept = few and cpus - busy >= num_workers + RESERVE
    if _kept:
        os.environ[_MODULES] = ",".join(MODULES)
        os.environ.setdefault(_LIMIT, str(2 * num_workers + 2))  # one trial's, the next one's, and Tune's own
        os.environ.setdefault(_FIRST, "0")  # Ray would start one for each core


def forget_environment() -> None:
    """Remove what `set_environment` set; another sweep of this process may have no free cores."""
    global _kept
    if _kept:
        _kept = False
        for name in (_MODULES, _LIMIT, _FIRST):
            os.environ.pop(name, None)


class SpareWorkers:
    """Prepares the workers of the next trial, once for each trial that begins."""

    def __init__(self) -> None:
        self._tasks: list[Any] = []
        self._wanted = _kept
        self._look_at = self._next_look()

    def begin(self) -> None:
        """Note that a trial begins, with the workers that are there."""
        self._wanted = _kept
        self._look_at = self._next_look()
        self._end_used()

    def prepare(self, count: int) -> None:
        """Make Ray start the processes that lack to so many, if cores are idle for them; they take seconds.

        Call it repeatedly while a trial trains.
        """
        if not self._wanted or time.monotonic() < self._look_at:
            return
        idle = (1 - psutil.cpu_percent() / 100) * (psutil.cpu_count() or 1)
        self._look_at = self._next_look()
        count -= len(idle_processes())
        # of a core that is all but idle Ray and the driver take a little
        if idle >= 0.8 * (count + RESERVE) and psutil.virtual_memory().available >= 2 * count * _MEMORY:
            self._wanted = False
            self._start(count)

    @staticmethod
    def _next_look() -> float:
        psutil.cpu_percent()  # the next call's is of the time from now
        return time.monotonic() + _LOOK_S

    def _start(self, count: int) -> None:
        import ray

        @ray.remote(num_cpus=0, max_retries=0)
        def process() -> int:
            return os.getpid()

        self._tasks = [process.remote() for _ in range(count)]
        time.sleep(_BEFORE_CANCEL_S)
        for task in self._tasks:
            ray.cancel(task)

    def _end_used(self) -> None:
        """End processes whose task was cancelled too late: Ray gives no worker a process that has run a task."""
        import ray

        for task in self._tasks:
            with suppress(ray.exceptions.RayError, psutil.Error):  # it was cancelled, as it should
                psutil.Process(ray.get(task, timeout=0)).kill()
        self._tasks = []


def idle_processes() -> set[int]:
    """Return the ids of the processes that Ray, which was started here, keeps ready."""
    found = set()
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if child.cmdline()[:1] == ["ray::IDLE"]:
                found.add(child.pid)
    return found
