"""Forecasts of many trials, in processes of their own, each distinct one once. Imports no torch."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path

from fsdp_lab.config import TrialConfig, UserError, memory_settings
from fsdp_lab.config.checks import local_cpus
from fsdp_lab.forecast.fits import Forecast, capacity_bytes, for_cuda

LIMIT_S = 300.0  # for one forecast; the largest model here takes some ten seconds
_SPEAK_S = 15.0  # how often one who waits hears how far it is
_LOOK_S = 0.5  # how often a wish to stop is looked at
_IMPORTS_S = 120.0  # for a process to start and import PyTorch, on a busy machine


@dataclass(frozen=True)
class Request:
    """One trial to forecast. `capacity_bytes` None: not known. `page`: where its timeline goes."""

    config: TrialConfig
    num_workers: int
    cuda: bool
    capacity_bytes: int | None
    page: Path | None = None

    @staticmethod
    def of(config: TrialConfig, num_workers: int, page: Path | None = None) -> Request:
        cuda = for_cuda(config)
        return Request(config, num_workers, cuda, capacity_bytes(config, cuda), page)

    @property
    def key(self) -> str:
        """Equal for requests with the same answer."""
        asks = self.config.forecast.largest_microbatch
        settings = [memory_settings(self.config, self.num_workers), self.cuda, self.capacity_bytes if asks else None]
        return json.dumps(settings, sort_keys=True)


def forecast_one(request: Request) -> Forecast:
    """In this process, which must have no process group.

    Raises:
        UserError: the configuration cannot be forecast.
    """
    from fsdp_lab.forecast.forecast import forecast

    return forecast(
        request.config,
        request.num_workers,
        request.cuda,
        request.capacity_bytes,
        request.config.forecast.largest_microbatch,
        request.page,
    )


def forecast_all(
    requests: Sequence[Request],
    on_done: Callable[[int, int], None] = lambda done, total: None,
    stop: threading.Event | None = None,
) -> list[Forecast]:
    """The forecast of each request, in their order, by one process for each core; what could not be forecast
    has `error`.

    Args:
        on_done: told how many of the distinct forecasts are done, of how many.
        stop: set by another thread to end this early.
    """
    distinct: dict[str, Request] = {}
    for request in requests:
        distinct.setdefault(request.key, request)
    if not distinct:
        return []
    count = min(local_cpus(), len(distinct))
    found: dict[str, Forecast] = {}
    # spawn: a fork would take over the threads and locks of Ray and MLflow
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), initializer=_start_worker)
    try:
        futures = {pool.submit(_answer, request): key for key, request in distinct.items()}
        until = time.monotonic() + _IMPORTS_S + LIMIT_S * len(distinct) / count
        waiting = set(futures)
        while waiting and time.monotonic() < until and not (stop and stop.is_set()):
            done, waiting = wait(waiting, timeout=_LOOK_S, return_when=FIRST_COMPLETED)
            found.update({futures[future]: _result(future, distinct[futures[future]]) for future in done})
            on_done(len(found), len(distinct))
    finally:
        children = list(pool._processes.values()) if pool._processes else []
        pool.shutdown(wait=False, cancel_futures=True)
        for child in children:
            child.kill()
    late = f"the forecast took more than {LIMIT_S:.0f} s"
    return [
        # the capacity is no part of what is shared, unless the largest microbatch was asked for
        replace(found[r.key], capacity_bytes=r.capacity_bytes)
        if r.key in found
        else Forecast(r.cuda, r.num_workers, error=late)
        for r in requests
    ]


class Background:
    """`forecast_all` in a thread, while something else goes on. Use as a context: leaving it ends the forecasts."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = requests
        self._found: list[Forecast] = []
        self._progress = (0, 0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="forecasts", daemon=True)

    def _run(self) -> None:
        self._found = forecast_all(self._requests, self._note, self._stop)

    def _note(self, done: int, total: int) -> None:
        self._progress = (done, total)

    def __enter__(self) -> Background:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=10 * _LOOK_S)

    def result(self, on_wait: Callable[[int, int], None] = lambda done, total: None) -> list[Forecast]:
        """Wait for all; `forecast_all` has a limit of its own. Empty when something went wrong in the thread.

        Args:
            on_wait: told from time to time how many of the distinct forecasts are done, of how many.
        """
        while self._thread.is_alive():
            self._thread.join(timeout=_SPEAK_S)
            if self._thread.is_alive():
                on_wait(*self._progress)
        return self._found


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a context here would take memory from those who train
    os.environ["OMP_NUM_THREADS"] = "1"


def _answer(request: Request) -> Forecast:
    try:
        return forecast_one(request)
    except UserError as error:
        return Forecast(request.cuda, request.num_workers, error=str(error))


def _result(future: Future[Forecast], request: Request) -> Forecast:
    try:
        return future.result()
    except BrokenProcessPool:
        reason = "the process that forecasts was killed"
    except Exception as error:  # noqa: BLE001 - a forecast that fails must not end the sweep
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    return Forecast(request.cuda, request.num_workers, error=reason)
