"""What a setting needs to fit, by `forecast.solve`: the largest microbatch, the fewest workers, the least memory."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from functools import cache

from fsdp_lab.config import ConfigError
from fsdp_lab.config.ranks import Ranks
from fsdp_lab.config.rules import check_trial
from fsdp_lab.config.sweep import Solve
from fsdp_lab.forecast.capacity import GIB, Forecast, Solved, weigh
from fsdp_lab.forecast.forecast import forecast, forecast_step
from fsdp_lab.forecast.request import Request

_MICROBATCH_LIMIT, _STEP_UP = 2**20, 2**4  # limit of the search if memory does not limit it
_MOST_WORKERS = 2**12


def solved(request: Request, made: Forecast) -> Solved | None:
    """Return the answer to `forecast.solve`, with its forecast; None: not asked, or the capacity is not known.

    Args:
        made: the forecast of the request.
    """
    asked, capacity = request.config.forecast.solve, request.capacity_bytes
    if asked is None or (capacity is None and asked is not Solve.capacity):
        return None
    if asked is Solve.capacity:
        value = _typed_gib(made.sure_bytes)
        at, again = replace(request, capacity_bytes=value), made
    else:

        @cache
        def room(number: int) -> int:
            return (capacity or 0) - _sure_bytes(_with(request, number))

        value, nearest = _largest(room) if asked is Solve.batch else _fewest(room, _numbers(request))
        at = _with(request, nearest)
        again = forecast(at.config, at.num_workers, at.cuda, at.capacity_bytes, sheet=at.sheet)
    again = at.weigh(again)
    return Solved(asked.name, value if again.fits else 0, again, at.samples_per_worker)


def _with(request: Request, number: int) -> Request:
    """Return the request with this microbatch size or number of workers, as `forecast.solve` requires."""
    config, workers = request.config, request.num_workers
    old = Ranks.of(config.sharding, workers).dp
    if config.forecast.solve is Solve.batch:
        batch = number * old * config.training.grad_accum_steps
    else:
        workers, batch = number, config.training.global_batch_size
        batch = batch // old * Ranks.of(config.sharding, number).dp if request.per_worker else batch
    sized = replace(config, training=replace(config.training, global_batch_size=batch))
    of_host = min(workers, request.node_size)
    return replace(request, config=sized, num_workers=workers, host=replace(request.host, num_workers=of_host))


def _typed_gib(num_bytes: int) -> int:
    """Return the bytes rounded up to a `forecast.capacity_gib` with two decimals."""
    hundredths = math.ceil(num_bytes / GIB * 100)
    return next(size for n in (hundredths, hundredths + 1) if (size := int(n / 100 * GIB)) >= num_bytes)


def _sure_bytes(request: Request) -> int:
    step = forecast_step(request.config, request.num_workers, request.cuda, sheet=request.sheet)
    weighed = weigh(step.profile, step.num_trained, request.config, request.num_workers, request.cuda, None)
    return weighed.sure_bytes


def _largest(room: Callable[[int], int]) -> tuple[int, int]:
    """Return the largest microbatch that fits (0: not even one sample), and the microbatch to forecast.

    One more sample does not fit. A much larger batch may fit the allocator's cached blocks better; that is not tried.
    The peak is piecewise linear and convex in the batch, so a root finder with secants needs few forecasts.
    """
    from scipy.optimize import brentq  # other forecasts need only PyTorch and torchvision

    if room(1) < 0:
        return 0, 1
    high = _STEP_UP
    while room(high) >= 0:
        if high >= _MICROBATCH_LIMIT:
            return high, high
        high *= _STEP_UP
    most = int(brentq(lambda size: room(round(size)), high // _STEP_UP, high, xtol=0.5))
    while room(most) < 0:
        most -= 1
    while room(most + 1) >= 0:
        most += 1
    return most, most


def _fewest(room: Callable[[int], int], numbers: list[int]) -> tuple[int, int]:
    """Return the fewest workers that fit (0: none of these), and the number to forecast.

    With more workers each holds less. A forecast of many takes longer, so the search starts with few.
    """
    end = 1
    while end < len(numbers) and room(numbers[end - 1]) < 0:
        end *= 2
    place = bisect_left(numbers, True, end // 2, min(end, len(numbers)), key=lambda number: room(number) >= 0)
    return (numbers[place], numbers[place]) if place < len(numbers) else (0, numbers[-1])


def _numbers(request: Request) -> list[int]:
    """Return the numbers of workers that the setting allows, the fewest first; above one node, only full nodes."""
    most, node = max(_MOST_WORKERS, request.num_workers), request.node_size

    def is_allowed(number: int) -> bool:
        try:
            check_trial(_with(request, number).config, number)
        except ConfigError:
            return False
        return True

    return [n for n in range(1, most + 1) if (n <= node or n % node == 0) and is_allowed(n)]
