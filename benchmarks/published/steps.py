"""Steps of published rows: their programs with few blocks, from which all follow, and their memory with all blocks."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import joblib

from benchmarks.published.rows import Row
from fsdp_lab.forecast.allocator import STREAMS, STREAMS_BEFORE_129721
from fsdp_lab.forecast.capacity import Forecast, weigh
from fsdp_lab.forecast.devices import torch_version
from fsdp_lab.forecast.pool import NoAnswerError, Pool
from fsdp_lab.forecast.speed.device import Device, Efficiency, Errors, KnownError
from fsdp_lab.forecast.speed.predict import step_seconds
from fsdp_lab.forecast.speed.program import Operator
from fsdp_lab.machine.hardware import num_cpus

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "outputs" / "published"

DEPTHS = (4, 6)  # a step is linear in its equal blocks; even numbers, for rows that checkpoint every second block
# Of a GPU: what needs less fits, however its memory is fragmented (0.31 of the GPU at most here). To follow the memory
# of all blocks takes most of the time.
ROOMY = 0.5
_LIMIT_S = 1800.0


@dataclass(frozen=True)
class Step:
    """A traced step of few blocks.

    Attributes:
        whole: its program, of two microbatches at most.
        again: the second of them alone, None where there is one.
    """

    whole: Sequence[Operator]
    again: Sequence[Operator] | None

    @classmethod
    def of(cls, program: Sequence[Operator]) -> Step:
        """Return the step of a program."""
        pairs = enumerate(pairwise(program), start=1)
        begins = [i for i, (one, other) in pairs if one.phase == "optimizer" and other.phase == "forward"]
        if not begins:
            return cls(program, None)
        end = max(i for i, operator in enumerate(program) if operator.phase == "backward")
        return cls(program, program[begins[0] : end + 1])

    def seconds(self, device: Device, microbatches: int) -> float:
        """Return the seconds with so many microbatches."""
        again = step_seconds(self.again, device) if self.again else 0.0
        return step_seconds(self.whole, device) + (microbatches - 2) * again


def along_depth(values: Mapping[int, float], blocks: int) -> float:
    """Return what a step of so many blocks has, by what two smaller ones have."""
    (low, few), (high, more) = sorted(values.items())
    return few + (blocks - low) * (more - few) / (high - low)


@dataclass(frozen=True)
class Asked:
    """What a trace depends on: rows that ask the same share one.

    Attributes:
        words: overrides, without the number of blocks.
        workers: GPUs.
        blocks: of the model.
        sheet: of the device, without what only prices a step.
        early: see `Row`.
        expandable: see `Row`.
        memory: follow the memory of all blocks, even if the step has room.
        code: a digest of everything that makes a trace.
    """

    words: tuple[str, ...]
    workers: int
    blocks: int
    sheet: Device
    early: bool
    expandable: bool
    memory: bool
    code: str

    @classmethod
    def of(cls, row: Row) -> Asked:
        """Return what a row asks."""
        sheet = replace(
            row.device, efficiency=Efficiency(1, 1, 1, 1, 1, 1, 1, 1), errors=Errors(KnownError(0.0, 0.0)),
            relative=None, network_bandwidth=1.0, launch_s=1.0, source="",
        )  # fmt: skip
        memory = row.reserved_gib is not None or row.allocated_gib is not None or not row.ran
        return cls(row.words, row.workers, row.blocks, sheet, row.early, row.expandable, memory, _code())


@dataclass(frozen=True)
class Traced:
    """A row with its steps of `DEPTHS` blocks, and the memory of a step of all blocks.

    Attributes:
        row: as published.
        steps: number of blocks -> step.
        memory: its forecast, on the row's device; None: it has room, see `ROOMY`. Reserved memory is not linear in the
            blocks.
    """

    row: Row
    steps: Mapping[int, Step]
    memory: Forecast | None

    @property
    def group(self) -> tuple[str, ...]:
        """What is equal in rows whose ratios are compared, as `ratio_group` has it; of float8 the recipe, too."""
        alike = [word for word in self.row.words if word.startswith(("data.seq_len", "compile="))]
        alike += [mark for mark in self.row.marks if mark.startswith("float8")]
        return (self.row.source, self.row.model, self.row.gpu, str(self.row.workers), *alike)

    def seconds(self, device: Device) -> float:
        """Return the predicted seconds of a step."""
        seconds = {blocks: step.seconds(device, self.row.microbatches) for blocks, step in self.steps.items()}
        return along_depth(seconds, self.row.blocks)


def trace(rows: Sequence[Row], on_done: Callable[[int, int], None]) -> list[Traced]:
    """Trace the steps of rows in processes, as many as there are cores; those of an earlier run are in `CACHE`.

    Raises:
        RuntimeError: a row has no forecast.
    """
    asked = {row.name: Asked.of(row) for row in rows}
    named = {one: name for name, one in asked.items()}
    answers: dict[Asked, tuple[Mapping[int, Step], Forecast | None]] = {}
    with Pool(_answer, num_cpus(), _LIMIT_S) as pool:
        # the longest first, so that none of them runs alone at the end
        futures = {one: pool.submit(one) for one in sorted(named, key=lambda one: -one.blocks * one.memory)}
        for done, (one, future) in enumerate(futures.items(), start=1):
            try:
                answer = future.result()
            except NoAnswerError as error:
                raise RuntimeError(f"{named[one]} has no forecast: its process {error}") from error
            if isinstance(answer, str):
                raise RuntimeError(f"{named[one]} has no forecast: {answer}")
            answers[one] = answer
            on_done(done, len(futures))
    return [Traced(row, *answers[asked[row.name]]) for row in rows]


@cache
def _code() -> str:
    """Return a digest of PyTorch's version and of the code that makes a trace."""
    rooms = ("config", "workloads", "training", "forecast")
    files = [file for room in rooms for file in sorted((ROOT / "fsdp_lab" / room).rglob("*.py"))]
    priced = ROOT / "fsdp_lab" / "forecast" / "speed"
    made_by = [file for file in files if file.parent != priced or file.name == "program.py"]
    content = [file.read_bytes() for file in [*made_by, Path(__file__).with_name("decoders.py")]]
    return sha256(b"".join([torch_version().encode(), *content])).hexdigest()


def _answer(asked: Asked) -> object:
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        return joblib.Memory(CACHE, verbose=0).cache(_follow)(asked)
    except Exception:  # noqa: BLE001 - the command ends with it
        return traceback.format_exc()


def _follow(asked: Asked) -> tuple[dict[int, Step], Forecast | None]:
    from fsdp_lab.config.without_hydra import read_config
    from fsdp_lab.forecast.forecast import forecast_step
    from fsdp_lab.forecast.step import Step as ForecastStep

    capacity = asked.sheet.memory_bytes

    def followed(blocks: int, traced: bool) -> tuple[ForecastStep, Forecast]:
        config = read_config(None, [*asked.words, f"model.num_layers={blocks}"])
        step = forecast_step(config, asked.workers, cuda=True, sheet=asked.sheet, traced=traced)
        streams = STREAMS_BEFORE_129721 if asked.early else STREAMS
        return step, weigh(
            step.profile, step.num_trained, config, asked.workers, True, capacity, streams, asked.expandable
        )

    few = {blocks: followed(blocks, traced=True) for blocks in DEPTHS}
    least = along_depth({blocks: memory.least_bytes for blocks, (_, memory) in few.items()}, asked.blocks)
    roomy = not asked.memory and least < ROOMY * capacity
    memory = None if roomy else followed(asked.blocks, traced=False)[1]
    return {blocks: Step.of(step.program) for blocks, (step, _) in few.items()}, memory
