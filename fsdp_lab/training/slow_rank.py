"""Which rank or node the others wait for: each rank's share of a step in computing, in loading and in waiting.

In two steps of the warm-up, each collective is completed before the next operator starts. So the time between
collectives is the rank's own, and the time in them is exchange and waiting for others. These steps are not timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from fsdp_lab.memory.torch_private import TorchDispatchMode, compiled_code_runs, wait_for_functional
from fsdp_lab.training.checkpoint import Metrics
from fsdp_lab.training.distributed import DistributedContext, gather
from fsdp_lab.training.speed import StepTimer

STEPS = 2  # that are measured
# A rank is slow if it computes so many times as long as any other in each of these steps, or waits for data longer by
# this share of a step. On a CPU, ranks share cores with each other and with everything else.
_CLEARLY = {"cuda": 1.2, "cpu": 2.0}
_WAITS = {"cuda": 0.1, "cpu": 0.3}
_MOST_NAMED = 8  # ranks that have metrics of their own


@dataclass
class _Own:
    """What a rank measured: seconds of each measured step, and the seconds of loading in a timed step."""

    rank: int
    node: str
    computing: list[float] = field(default_factory=list)
    exchanging: list[float] = field(default_factory=list)
    loading: list[float] = field(default_factory=list)
    waits_s: float = 0.0


class SlowRank:
    """Measures the steps of a run that has several ranks, and names a rank or node that is slower than all others.

    Args:
        nodes: that of each rank.
        compiled: blocks are compiled.

    Attributes:
        slow: `who`, the `part` of a step and a sentence, `text`; empty: none is slow, or it is not known yet.
    """

    def __init__(self, ranks: DistributedContext, nodes: Sequence[str], compiled: bool) -> None:
        self._ranks, self._compiled = ranks, compiled
        self._own = _Own(ranks.rank, nodes[ranks.rank])
        self.slow: dict[str, str] = {}

    def measures(self, left_out: int) -> bool:
        """Return whether the next step is to be measured; `left_out`: steps of the warm-up that are left."""
        return self._ranks.world_size > 1 and 0 < STEPS - len(self._own.computing) <= left_out

    @contextmanager
    def step(self, loading_s: float) -> Iterator[None]:
        """Measure the step inside; `loading_s`: that this rank has waited for its batches."""
        with ExitStack() as entered:
            if self._compiled:
                entered.enter_context(compiled_code_runs())
            mode = entered.enter_context(_CompleteCollectives(self._synchronize))
            begun = time.perf_counter()
            yield
            self._synchronize()
            took = time.perf_counter() - begun
        self._own.computing.append(took - mode.seconds)
        self._own.exchanging.append(mode.seconds)
        self._own.loading.append(loading_s)

    def _synchronize(self) -> None:
        if self._ranks.device.type == "cuda":
            torch.cuda.synchronize(self._ranks.device)

    def figures(self, timer: StepTimer) -> Metrics:
        """Return `perf/rank<r>/*` of up to eight ranks, and look for a slow one. Every rank calls it, after each epoch.

        Args:
            timer: it has returned the steps of the epoch.
        """
        if self._ranks.world_size == 1:
            return {}
        self._own.waits_s = timer.waited_s / max(1, len(timer.taken))
        everyone = gather(self._own)
        step_s = sum(timer.taken) / max(1, len(timer.taken))
        self.slow = next(_slow(everyone, step_s, self._ranks.device.type), {})
        if len(everyone[0].computing) < STEPS or len(everyone) > _MOST_NAMED:
            return {}
        return {f"perf/rank{one.rank}/{part}": share for one in everyone for part, share in _shares(one, everyone)}


def _shares(one: _Own, everyone: Sequence[_Own]) -> Iterator[tuple[str, float]]:
    """Yield the shares of a rank's measured steps; what is left is the exchange itself."""
    whole = sum(one.computing) + sum(one.exchanging) + sum(one.loading)
    least = sum(min(other.exchanging[i] for other in everyone) for i in range(STEPS))  # nobody waits here
    waiting = sum(one.exchanging) - least
    parts = {"compute_share": sum(one.computing), "data_share": sum(one.loading), "others_share": waiting}
    yield from ((name, seconds / whole) for name, seconds in parts.items())


def _slow(everyone: Sequence[_Own], step_s: float, device: str) -> Iterator[dict[str, str]]:
    """Yield each rank, and each node with all its ranks, that is slower than all others, with the part of a step."""
    for who, own, others in _apart(everyone):
        computes = min((t for one in own for t in one.computing), default=0.0)
        most = max((t for one in others for t in one.computing), default=0.0)
        if len(own[0].computing) == STEPS and computes > _CLEARLY[device] * most:
            yield {
                "who": who, "part": "compute", "text":
                f"{who} is slower than the others: it computes {_seconds(computes)} of a step, the others "
                f"{_seconds(most)} at most, and they wait for it. Look there for other processes, heat, power limits "
                "and longer batches.",
            }  # fmt: skip
        loads, most = min(one.waits_s for one in own), max(one.waits_s for one in others)
        if step_s and loads - most > _WAITS[device] * step_s:
            yield {
                "who": who, "part": "data", "text":
                f"{who} is slower than the others: it waits {_seconds(loads)} a step for its data, the "
                f"others {_seconds(most)} at most, and then for it. Look at the disk or network there, and at "
                "data.loader_workers.",
            }  # fmt: skip


def _apart(everyone: Sequence[_Own]) -> Iterator[tuple[str, list[_Own], list[_Own]]]:
    """Yield each node, if there are several, and each rank: its name, its ranks and the others."""
    nodes = {one.node: None for one in everyone}
    keys: Mapping[str, Callable[[_Own], Any]] = {"Node": lambda one: one.node, "Rank": lambda one: one.rank}
    for kind, key in keys.items():
        for value in nodes if kind == "Node" else range(len(everyone)):
            own, others = [o for o in everyone if key(o) == value], [o for o in everyone if key(o) != value]
            if others:
                name = f"{kind} {value}"
                yield (name if kind == "Node" or len(nodes) == 1 else f"{name} on node {own[0].node}"), own, others


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms"


class _CompleteCollectives(TorchDispatchMode):
    """Completes each collective before the next operator begins, and counts the seconds in them."""

    supports_higher_order_operators = True  # as torch.cond

    def __init__(self, synchronize: Callable[[], None]) -> None:
        super().__init__()
        self._synchronize, self.seconds = synchronize, 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if getattr(func, "namespace", "") not in ("c10d", "_c10d_functional"):
            return func(*args, **(kwargs or {}))
        self._synchronize()
        begun = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple) else (result,):
            if isinstance(each, torch.ScriptObject):
                dist.Work.unbox(each).wait()
            elif func.namespace == "_c10d_functional" and isinstance(each, torch.Tensor):
                wait_for_functional(each)
        self._synchronize()
        self.seconds += time.perf_counter() - begun
        return result
