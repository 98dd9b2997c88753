"""Forecasts of many trials, in processes of their own, each distinct one once. Imports no torch."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from fsdp_lab.config import SweepConfig, UserError, memory_settings
from fsdp_lab.forecast.fits import Forecast, capacity_bytes, for_cuda
from fsdp_lab.hardware import num_cpus

LIMIT_S = 300.0  # for one forecast; the largest model here takes some ten seconds
_A_PROCESS = 4  # forecasts: a process first imports PyTorch, which takes as long as four small ones
_SPEAK_S = 15.0  # how often one who waits hears how far it is
_LOOK_S = 0.5  # how often a wish to stop is looked at
_UNDONE = (
    f"the forecast did not end within {LIMIT_S:.0f} s, or its process was killed, most likely for want of memory; "
    "forecast fewer at once, or go without: forecast.enabled=false in a sweep"
)
_IMPORTS_S = 120.0  # for a process to start and import PyTorch, on a busy machine


@dataclass(frozen=True)
class Request:
    """One trial to forecast. `capacity_bytes` None: not known. `page`: where its timeline goes."""

    config: SweepConfig
    num_workers: int
    cuda: bool
    capacity_bytes: int | None
    page: Path | None = None

    @staticmethod
    def of(config: SweepConfig, num_workers: int, page: Path | None = None) -> Request:
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
    """The forecast of each request, in their order, by processes of their own; what could not be forecast
    has `error`.

    Args:
        on_done: told how many of the distinct forecasts are done, of how many.
        stop: set by another thread to end this early.
    """
    distinct: dict[str, Request] = {}
    for request in requests:
        distinct.setdefault(request.key, request)
    found: dict[str, Forecast] = {}

    def note(key: str, forecast: Forecast) -> None:
        found[key] = forecast
        on_done(len(found), len(distinct))

    _in_pool(distinct, min(num_cpus(), -(-len(distinct) // _A_PROCESS)), note, stop)
    # A process that dies takes its pool along, most likely for want of memory: the rest goes one at a time.
    for key in distinct.keys() - found.keys():
        _in_pool({key: distinct[key]}, 1, note, stop)
    return [
        # the capacity is no part of what is shared, unless the largest microbatch was asked for
        replace(found[r.key], capacity_bytes=r.capacity_bytes)
        if r.key in found
        else Forecast(r.cuda, r.num_workers, error=_UNDONE)
        for r in requests
    ]


def _in_pool(
    requests: dict[str, Request], processes: int, note: Callable[[str, Forecast], None], stop: threading.Event | None
) -> None:
    """Forecast in so many processes; what takes too long, dies or does not start is not noted."""
    if not requests or (stop and stop.is_set()):
        return
    children = []
    pool = _pool(processes)
    try:
        futures = {pool.submit(_answer, request): key for key, request in requests.items()}
        children = list(pool._processes.values())
        until = time.monotonic() + _IMPORTS_S + LIMIT_S * len(requests) / processes
        waiting = set(futures)
        while waiting and time.monotonic() < until and not (stop and stop.is_set()):
            done, waiting = wait(waiting, timeout=_LOOK_S, return_when=FIRST_COMPLETED)
            for future in done:
                with suppress(BrokenProcessPool):
                    note(futures[future], future.result())
    except OSError as error:  # a process could not be started: seen once in many, and the next one could
        print(f"a process for forecasts did not start ({error}); trying again", file=sys.stderr, flush=True)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in children:
            child.kill()
        for child in children:
            child.join(timeout=10 * _LOOK_S)


def _pool(processes: int) -> ProcessPoolExecutor:
    """A pool whose processes start when they get something to do."""
    # spawn: a fork would take over the threads and locks of Ray and MLflow
    context = multiprocessing.get_context("spawn")
    try:
        return ProcessPoolExecutor(processes, context, initializer=_start_worker)
    except OSError:
        # the process in which Python keeps its semaphores was ended, by whomever: the second time there is a new one
        return ProcessPoolExecutor(processes, context, initializer=_start_worker)


class Background:
    """`forecast_all` in a thread, while something else goes on. Use as a context: leaving it ends the forecasts."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = requests
        self._found: list[Forecast] = []
        self._progress = (0, 0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="forecasts", daemon=True)

    def _run(self) -> None:
        try:
            self._found = forecast_all(self._requests, self._note, self._stop)
        except Exception as error:  # noqa: BLE001 - no forecast is worth a sweep
            reason = f"{type(error).__name__}: {error}"
            self._found = [Forecast(r.cuda, r.num_workers, error=reason) for r in self._requests]

    def _note(self, done: int, total: int) -> None:
        self._progress = (done, total)

    def __enter__(self) -> Background:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=10 * _LOOK_S)

    def result(self, on_wait: Callable[[int, int], None] = lambda done, total: None) -> list[Forecast]:
        """Wait for all; `forecast_all` has a limit of its own.

        Args:
            on_wait: told from time to time how many of the distinct forecasts are done, of how many.
        """
        while self._thread.is_alive():
            self._thread.join(timeout=_SPEAK_S)
            if self._thread.is_alive():
                on_wait(*self._progress)
        return self._found


class Forecaster:
    """One process that forecasts what it is given, one after the other; it starts with the first. Use as a context."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Forecaster:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            children = list(self._pool._processes.values())
            self._pool.shutdown(wait=False, cancel_futures=True)
            for child in children:
                child.kill()

    def submit(self, request: Request) -> Future[Forecast]:
        if self._pool is None:
            self._pool = _pool(1)
        try:
            return self._pool.submit(_answer, request)
        except BrokenProcessPool:  # the process died, most likely for want of memory
            self._pool = None
            return self.submit(request)

    @staticmethod
    def result(future: Future[Forecast], request: Request) -> Forecast:
        """Wait for it; what does not come in time, or dies, has `error`."""
        try:
            found = future.result(timeout=_IMPORTS_S + LIMIT_S)
            return replace(found, capacity_bytes=request.capacity_bytes)
        except (TimeoutError, BrokenProcessPool):
            return Forecast(request.cuda, request.num_workers, error=_UNDONE)


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a context here would take memory from those who train
    os.environ["OMP_NUM_THREADS"] = "1"
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)  # the parent was killed, and could not end this


def _answer(request: Request) -> Forecast:
    try:
        return forecast_one(request)
    except UserError as error:
        return Forecast(request.cuda, request.num_workers, error=str(error))
    except Exception as error:  # noqa: BLE001 - told in the table; the others go on
        traceback.print_exception(error)
        lines = str(error).strip().splitlines()
        reason = f"{type(error).__name__}: {lines[0] if lines else ''}"
        return Forecast(request.cuda, request.num_workers, error=reason)
