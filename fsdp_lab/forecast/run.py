"""Forecasts of many trials in separate processes, each distinct one once. Imports no torch."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Literal, Self

from fsdp_lab.config import ModelError, UserError
from fsdp_lab.config.target import user_line
from fsdp_lab.forecast.capacity import Forecast, NoForecast
from fsdp_lab.forecast.pool import LateError, NoAnswerError, Pool
from fsdp_lab.forecast.request import Request
from fsdp_lab.machine.hardware import num_cpus

LIMIT_S = 420.0  # for one forecast and the imports before it; the largest model here takes some ten seconds
_A_PROCESS = 4  # forecasts per process: its import of PyTorch takes as long as four small forecasts
SPEAK_S = 15.0  # seconds between two reports of progress
_LOOK_S = 0.5  # seconds between two checks of `stop`


def forecast_one(request: Request) -> Forecast:
    """Forecast a request in this process, which must have no process group.

    Raises:
        UserError: the configuration cannot be forecast.
    """
    return request.weigh(_forecast(request))


def _forecast(request: Request) -> Forecast:
    from fsdp_lab.forecast.forecast import forecast
    from fsdp_lab.forecast.solve import solved

    asked = request.config, request.num_workers, request.cuda, request.capacity_bytes
    made = forecast(*asked, request.page, request.sheet, request.step)
    return replace(made, solved=solved(request, made))


def forecast_all(
    requests: Sequence[Request],
    on_done: Callable[[int, int], None] = lambda done, total: None,
    stop: threading.Event | None = None,
) -> list[Forecast]:
    """Return the forecast of each request in order, made in separate processes. A failed forecast has `error`.

    An interrupt ends this early: the forecasts that were not made are `cancelled`.

    Args:
        on_done: called with the number of distinct forecasts that are done, and of all.
        stop: set by another thread to end this early.

    Raises:
        KeyboardInterrupt: interrupted before the first forecast.
    """
    distinct: dict[str, Request] = {}
    for request in requests:
        distinct.setdefault(request.key, request)
    made: dict[str, Forecast] = {}

    def note(key: str, answer: Future[Forecast]) -> None:
        made[key] = _result(distinct[key], answer)
        on_done(len(made), len(distinct))

    try:
        solving = any(request.config.forecast.solve for request in requests)  # each takes many forecasts
        _in_pool(distinct, min(num_cpus(), -(-len(distinct) // (1 if solving else _A_PROCESS))), note, stop)
        # A process most likely dies because memory ran out: its forecast is retried once, without others.
        for key in [key for key, forecast in made.items() if forecast.error and forecast.error.code == "lost"]:
            _in_pool({key: distinct[key]}, 1, note, stop)
    except KeyboardInterrupt:
        if not made:
            raise
    # requests with other capacities share a forecast, unless `forecast.solve` needs the capacity
    return [r.weigh(made[r.key]) if r.key in made else _without(r, NoForecast("cancelled")) for r in requests]


def _in_pool(
    requests: dict[str, Request],
    processes: int,
    note: Callable[[str, Future[Forecast]], None],
    stop: threading.Event | None,
) -> None:
    """Forecast in so many processes; each request is noted when it is done, with an answer or without."""
    if not requests or (stop and stop.is_set()):
        return
    alike: dict[str, list[str]] = {}
    for key, request in requests.items():
        alike.setdefault(request.step, []).append(key)
    with Pool(_answer_all, processes, LIMIT_S * max(map(len, alike.values()))) as pool:
        futures = {pool.submit([requests[key] for key in keys]): keys for keys in alike.values()}
        waiting = set(futures)
        while waiting and not (stop and stop.is_set()):
            done, waiting = wait(waiting, timeout=_LOOK_S, return_when=FIRST_COMPLETED)
            for future in done:
                for place, key in enumerate(futures[future]):
                    note(key, _one_of(future, place))


def _one_of(answers: Future[list[Forecast]], place: int) -> Future[Forecast]:
    one: Future[Forecast] = Future()
    if error := answers.exception():
        one.set_exception(error)
    else:
        one.set_result(answers.result()[place])
    return one


def _result(request: Request, answer: Future[Forecast]) -> Forecast:
    """Wait for a forecast. One that is late, or whose process dies, has `error`."""
    try:
        return answer.result()
    except NoAnswerError as error:
        return _without(request, NoForecast("late" if isinstance(error, LateError) else "lost", str(error)))
    except CancelledError:
        return _without(request, NoForecast("cancelled"))


def _without(request: Request, error: NoForecast, trace: str = "") -> Forecast:
    return Forecast(request.cuda, request.num_workers, error=error, traceback=trace)


def _raised(code: Literal["model_error", "user_error", "not_followed", "error"], error: Exception) -> NoForecast:
    cause = error.__cause__ if error.__cause__ and error.__cause__.__traceback__ else error
    last = traceback.extract_tb(cause.__traceback__)[-1]
    at = user_line(cause) or f"{last.filename}:{last.lineno}"
    return NoForecast(code, str(error), type(error).__name__, at)


class Background:
    """Runs `forecast_all` in a thread. Use it as a context: leaving it ends the forecasts."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = requests
        self._progress = (0, 0)
        self._stop = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="forecasts")

    def __enter__(self) -> Self:
        self._made = self._thread.submit(forecast_all, self._requests, self._note, self._stop)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.shutdown()

    def _note(self, done: int, total: int) -> None:
        self._progress = (done, total)

    def result(self, on_wait: Callable[[int, int], None] = lambda done, total: None) -> list[Forecast]:
        """Wait for all forecasts; `forecast_all` has its own limit.

        Args:
            on_wait: called from time to time with the number of distinct forecasts that are done, and of all.
        """
        while not wait([self._made], timeout=SPEAK_S).done:
            on_wait(*self._progress)
        try:
            return self._made.result()
        except Exception as error:  # noqa: BLE001 - a failed forecast must not fail the sweep
            return [_without(request, _raised("error", error)) for request in self._requests]


class Forecaster(Pool):
    """One process that forecasts requests one after the other; it starts with the first. Use it as a context."""

    def __init__(self) -> None:
        super().__init__(_answer, 1, LIMIT_S)

    @staticmethod
    def result(future: Future[Forecast], request: Request) -> Forecast:
        """Wait for a forecast. One that is late, or whose process dies, has `error`."""
        return request.weigh(_result(request, future))


def _answer_all(requests: Sequence[Request]) -> list[Forecast]:
    """Answer requests with the same step."""
    return [_answer(request) for request in requests]


def _answer(request: Request) -> Forecast:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a CUDA context here would take memory from training
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # warnings about a step that does not run
    try:
        return _forecast(request)
    except UserError as error:
        from fsdp_lab.forecast.forecast import NotFollowedError

        not_followed, of_model = isinstance(error, NotFollowedError), isinstance(error, ModelError)
        raised = _raised("not_followed" if not_followed else "model_error" if of_model else "user_error", error)
        trace = "".join(traceback.format_exception(error)) if error.__cause__ else ""  # otherwise the message is enough
        return _without(request, raised, trace)
    except Exception as error:  # noqa: BLE001 - shown in the table; the others continue
        traceback.print_exception(error)
        return _without(request, _raised("error", error))
