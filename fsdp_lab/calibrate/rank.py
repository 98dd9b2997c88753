"""One rank of a calibration: trains each reference a few steps at a time, in rounds."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fsdp_lab.calibrate.reference import Reference
from fsdp_lab.config import TrialConfig
from fsdp_lab.config.parallel import OffloadConfig
from fsdp_lab.forecast.trace import StepTrace
from fsdp_lab.speed.measured import amounts
from fsdp_lab.speed.program import Kind, Operator
from fsdp_lab.training.__main__ import read_config
from fsdp_lab.training.build import build, leaves_some_unused
from fsdp_lab.training.checkpoint import TrainState
from fsdp_lab.training.data import microbatch_size
from fsdp_lab.training.distributed import (
    DistributedContext,
    build_parallel_dims,
    join_by_file_store,
    largest,
    setup_distributed,
)
from fsdp_lab.training.loop import train_step
from fsdp_lab.training.weights import init_weights
from fsdp_lab.workloads.base import Batch, Workload, tensors_of
from fsdp_lab.workloads.build import build_workload

SMALL = ("data.num_train=256", "data.num_val=8", "checkpoint.mode=off", "export=false", "memory_profile=off")
_WAIT_S = 60.0  # for the other ranks
_STEPS = 6  # of a reference in each round, after a warm-up step
_MOST_ROUNDS = 20
_SENT = (2**12, 2**16, 2**19, 2**21, 2**23)  # bytes of the collectives that are timed
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ATTENTION = tuple(itertools.product((17, 64, 197), (32, 64), (False, True)))  # length, size of a head, causal or not
_HEADS = 16  # of attention that is timed alone


@dataclass
class Seconds:
    """The measurements of a reference.

    Attributes:
        steps: seconds of each step.
        operators: seconds of each operator, for each traced step.
    """

    steps: list[float] = field(default_factory=list)
    operators: list[list[float]] = field(default_factory=list)


class TimedTrace(StepTrace):
    """Records operators of real tensors, and the time of each.

    Attributes:
        seconds: of each operator of the program.
    """

    def __init__(self) -> None:
        super().__init__(None)
        self.seconds: list[float] = []
        self._last = 0.0

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator and time it."""
        begun = time.perf_counter()
        result = func(*args, **kwargs)
        self._last = time.perf_counter() - begun
        return result

    def add(self, *args: Any, **kwargs: Any) -> None:
        """Add an operator to the program, with the time of the last run."""
        super().add(*args, **kwargs)
        self.seconds.append(self._last)


class Subject:
    """A reference, built and ready to step.

    Attributes:
        program: the operators of a step; empty before the first round.
        seconds: the measurements so far.
    """

    def __init__(self, reference: Reference, ranks: DistributedContext) -> None:
        self.config: TrialConfig = read_config(None, [*SMALL, *reference.words])
        self._ranks = ranks
        workload: Workload = build_workload(self.config.model, self.config.data, self.config.task)
        dims = build_parallel_dims(self.config.sharding, ranks)
        self._task, device = workload.task, ranks.device
        self._state: TrainState = build(
            workload.model, self.config, dims, device,
            materialize=lambda model, blueprint: init_weights(model, blueprint, self.config, device, None),
            find_unused=leaves_some_unused(workload, self.config),
        )  # fmt: skip
        self._state.model.train()
        size = microbatch_size(self.config.training, dims)
        self._batches = [workload.data.example_batch(size) for _ in range(self.config.training.grad_accum_steps)]
        _fill(self._batches)
        self.seconds = Seconds()
        self.program: list[Operator] = []

    def round(self) -> None:
        """Take some steps, and then one operator by operator."""
        self._step()
        for _ in range(_STEPS):
            begun = time.perf_counter()
            self._step()
            self.seconds.steps.append(time.perf_counter() - begun)
        trace = TimedTrace()
        with trace.following(lambda: ("", "")):
            self._step()
        if len(trace.program) == len(self.program) or not self.program:  # a scaler may skip the optimizer's step
            self.program = trace.program
            self.seconds.operators.append(trace.seconds)

    def _step(self) -> None:
        train_step(self._state, self._task, self._batches, self.config, self._ranks.device)


def _fill(batches: Sequence[Batch]) -> None:
    for tensor in tensors_of(list(batches)):
        if tensor.is_floating_point():
            tensor.normal_()
        else:
            tensor.random_(0, 10)


def run_rank(rank: int, workers: int, folder: str, references: Sequence[Reference], until: float) -> None:
    """Measure until a point in time, and write `rank<n>.json`.

    Args:
        rank: of this process.
        workers: number of ranks.
        folder: for the process group's file and the result.
        references: to measure.
        until: seconds since the epoch; every reference is measured at least once.
    """
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(workers), LOCAL_WORLD_SIZE=str(workers))
    torch.set_num_threads(1)
    join_by_file_store(f"{folder}/store", OffloadConfig().backend(cuda=False), rank, workers, _WAIT_S)
    ranks = setup_distributed()

    def log(what: str) -> None:
        if rank == 0:
            print(what, flush=True)

    torch.manual_seed(0)
    collectives, attention = time_collectives(ranks), time_attention(ranks)
    log(f"builds {len(references)} small models")
    subjects = [Subject(reference, ranks) for reference in references]
    for count in range(1, _MOST_ROUNDS + 1):
        begun = time.time()
        for subject in subjects:
            subject.round()
        left = until - time.time()
        log(f"round {count}: {_STEPS} steps of each in {time.time() - begun:.0f} s, {max(left, 0):.0f} s left")
        if largest(float(left < time.time() - begun)):  # not enough for another
            break
    measurements = {
        "collectives": collectives,
        "attention": attention,
        "references": [
            {"steps": s.seconds.steps, "operators": _medians(s.program, s.seconds.operators)} for s in subjects
        ],
    }
    Path(folder, f"rank{rank}.json").write_text(json.dumps(measurements))
    dist.barrier()
    os._exit(0)  # PyTorch's threads outlive the interpreter now and then


def _medians(program: Sequence[Operator], seconds: Sequence[Sequence[float]]) -> list[list[Any]]:
    """Return `[name, kind, dtype, flops, bytes, items, seconds]` of each operator except collectives, timed alone."""
    columns = zip(program, zip(*seconds, strict=True), strict=True)
    return [
        [o.name, o.kind.value, o.dtype, *amounts(o), lower_quartile(times)]
        for o, times in columns
        if not o.kind.is_collective
    ]


def lower_quartile(times: Sequence[float]) -> float:
    """Return the lower quartile: others who compute now and then make some of the times longer, and none shorter."""
    return sorted(times)[len(times) // 4]


def time_attention(ranks: DistributedContext, repeats: int = 7) -> list[list[Any]]:
    """Return the times of attention forwards and backwards by the size of its heads, in the rows of `_medians`.

    Several lengths are measured, because a shorter sequence does not predict the time of a longer one.
    """
    timed: list[list[Any]] = []
    for dtype, (length, size, causal) in itertools.product(_DTYPES, _ATTENTION):
        shape = (1, _HEADS, length, size)
        query, key, value = (torch.randn(shape, dtype=dtype, device=ranks.device, requires_grad=True) for _ in range(3))
        times: list[list[float]] = []
        program: list[Operator] = []
        for _ in range(repeats):
            trace = TimedTrace()
            with trace.following(lambda: ("", "")):
                scaled_dot_product_attention(query, key, value, is_causal=causal).backward(value)
            program = trace.program
            times.append(trace.seconds)
        rows = _medians(program, times[1:])
        timed += [row for row in rows if row[1] == Kind.attention]
    return timed


def time_collectives(ranks: DistributedContext) -> list[list[Any]]:
    """Return `[kind, dtype, bytes that all ranks hold together, seconds]` of collectives of several sizes."""
    rows: list[list[Any]] = []
    if ranks.world_size == 1:
        return rows
    for dtype in _DTYPES:
        for num_bytes in _SENT:
            part = torch.zeros(
                max(num_bytes // dtype.itemsize // ranks.world_size, 1), dtype=dtype, device=ranks.device
            )
            whole = torch.zeros(part.numel() * ranks.world_size, dtype=dtype, device=ranks.device)
            for kind, send in _sends(part, whole).items():
                seconds = _time(send)
                rows.append([kind.value, str(dtype).removeprefix("torch."), whole.nbytes, seconds])
    return rows


def _sends(part: Tensor, whole: Tensor) -> dict[Kind, Callable[[], object]]:
    return {
        Kind.gather: lambda: dist.all_gather_into_tensor(whole, part),
        Kind.scatter: lambda: dist.reduce_scatter_tensor(part, whole),
        Kind.reduce: lambda: dist.all_reduce(whole),
    }


def _time(send: Callable[[], object], repeats: int = 7) -> float:
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        send()
        times.append(time.perf_counter() - begun)
    return lower_quartile(times[1:])
