"""The seconds of a call on this process's device, as medians."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

import torch

from fsdp_lab.forecast.speed.program import Operator
from fsdp_lab.training.distributed import largest, together

BUSY = 0.05  # spread of medians above which other work uses the device
_MEDIANS = 3
_MEDIAN_S = 0.04  # total seconds of the calls for one median
_CALLS = (5, 50)  # the fewest and the most of them


class Case(NamedTuple):
    """A thing to time.

    Attributes:
        program: its operators, as a forecast prices them.
        make: allocates its buffers, and returns the function to time; that gets the number of the turn, to rotate
            buffers.
    """

    program: Sequence[Operator]
    make: Callable[[], Callable[[int], object]]


class Timed(NamedTuple):
    """The median of some medians, and their spread, as a share of it.

    On a CPU it is the smallest median, because other processes only add time. For collectives on CPUs it is the mean of
    all calls: a step waits for each, so late ones count.
    """

    seconds: float
    spread: float


class Timer:
    """Times cases on a device: with events on a GPU, with the clock on a CPU. All ranks make the same calls."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def time(self, case: Case) -> Timed:
        """Return the seconds of one call. Errors of its operators pass, for example if a kernel is missing."""
        call = together(case.make)  # if one rank lacks memory, no other waits for it
        first = together(lambda: self._calls(call, 5)[2:])  # the first two choose kernels and compile
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
