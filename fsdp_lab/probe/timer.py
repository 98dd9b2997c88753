"""Seconds of a call on this process's device: medians, while nothing else waits for the device."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

import torch

from fsdp_lab.forecast.speed.program import Operator
from fsdp_lab.training.distributed import largest, together

BUSY = 0.05  # the spread of medians above which something else uses the device
_MEDIANS = 3
_MEDIAN_S = 0.04  # of calls for a median
_CALLS = (5, 50)  # the fewest and the most of them


class Case(NamedTuple):
    """A thing to time.

    Attributes:
        program: its operators, as a forecast prices them.
        make: makes its buffers, and returns what runs it; called with the number of the turn, for buffers that rotate.
    """

    program: Sequence[Operator]
    make: Callable[[], Callable[[int], object]]


class Timed(NamedTuple):
    """The median of some medians, and how far these are apart, as a share of it.

    On a CPU the least of them: other processes only make them longer. What ranks of a CPU send takes the mean of all
    calls: a step waits for each, and the late ones are a part of it.
    """

    seconds: float
    spread: float


class Timer:
    """Times cases on a device: by events on a GPU, by the clock on a CPU. Every rank times each, with as many calls."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def time(self, case: Case) -> Timed:
        """Return the seconds of one call. What its operators raise is raised, for example for want of a kernel."""
        call = together(case.make)  # no rank waits for one without memory
        first = together(lambda: self._calls(call, 5)[2:])  # two calls choose kernels, and compile
        calls = min(max(int(_MEDIAN_S / largest(median(first))), _CALLS[0]), _CALLS[1])
        turns = [self._calls(call, calls) for _ in range(_MEDIANS)]
        medians = sorted(map(median, turns))
        spread = (medians[-1] - medians[0]) / median(medians)
        if self._device.type != "cpu":
            return Timed(median(medians), spread)
        sends = any(operator.kind.is_collective for operator in case.program)
        return Timed(fmean(itertools.chain(*turns)) if sends else medians[0], spread)

    def _calls(self, call: Callable[[int], object], count: int) -> list[float]:
        marks = [self._mark()]
        for turn in range(count):
            call(turn)
            marks.append(self._mark())
        if self._device.type == "cpu":
            return [end - begin for begin, end in itertools.pairwise(marks)]
        torch.cuda.synchronize(self._device)
        return [begin.elapsed_time(end) / 1000 for begin, end in itertools.pairwise(marks)]

    def _mark(self) -> Any:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
