"""Steps of published rows: their programs with few blocks, from which all follow, and their memory with all blocks."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.published.rows import Row
from fsdp_lab.forecast.allocator import STREAMS, STREAMS_BEFORE_129721
from fsdp_lab.forecast.capacity import GIB, NEARLY_FULL_ERROR, Forecast, weigh
from fsdp_lab.forecast.pool import NoAnswerError, Pool
from fsdp_lab.forecast.speed.device import Device, on_network
from fsdp_lab.forecast.speed.predict import NETWORKS, step_seconds
from fsdp_lab.forecast.speed.program import Operator
from fsdp_lab.machine.hardware import num_cpus

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
class Traced:
    """A row with its steps of `DEPTHS` blocks, and the memory of a step of all blocks.

    Attributes:
        row: as published.
        steps: number of blocks -> step.
        memory: its forecast, on the row's device; None: it has room, see `ROOMY`. Reserved memory is not linear in the
            blocks.
        unlike: how it differs from the steps that the device's error is known for.
    """

    row: Row
    steps: Mapping[int, Step]
    memory: Forecast | None
    unlike: tuple[str, ...]

    def seconds(self, device: Device) -> float:
        """Return the predicted seconds of a step."""
        seconds = {blocks: step.seconds(device, self.row.microbatches) for blocks, step in self.steps.items()}
        return along_depth(seconds, self.row.blocks)

    def range(self, device: Device) -> tuple[float, float]:
        """Return the range of a predicted step, as a forecast has it: see `predict` and `on_capacity`."""
        step_s = self.seconds(device)
        steps = [step_s]
        if self.row.several_nodes and not device.network_known:
            ends = (on_network(device, device.network_gbit * factor) for factor in (NETWORKS[0], NETWORKS[-1]))
            steps += [self.seconds(one) for one in ends]
        most = (device.error_elsewhere if self.unlike else device.error).p90
        low, high = min(steps) / (1 + most), max(steps) / (1 - most)
        if self.memory is not None and self.memory.nearly_full:
            high = max(high, step_s / (1 - NEARLY_FULL_ERROR))
        return low, high


def trace(rows: Sequence[Row], on_done: Callable[[int, int], None]) -> list[Traced]:
    """Trace the steps of rows in processes, as many as there are cores.

    Raises:
        RuntimeError: a row has no forecast.
    """
    with Pool(_trace, num_cpus(), _LIMIT_S) as pool:
        # the longest first, so that none of them runs alone at the end
        order = sorted(range(len(rows)), key=lambda place: -rows[place].workers * rows[place].microbatches)
        futures = {place: pool.submit(rows[place]) for place in order}
        traced = {}
        for done, (place, future) in enumerate(futures.items(), start=1):
            try:
                answer = future.result()
            except NoAnswerError as error:
                raise RuntimeError(f"{rows[place].name} has no forecast: its process {error}") from error
            if isinstance(answer, str):
                raise RuntimeError(f"{rows[place].name} has no forecast: {answer}")
            traced[place] = answer
            on_done(done, len(rows))
    return [traced[place] for place in range(len(rows))]


def _trace(row: Row) -> Traced | str:
    os.environ["OMP_NUM_THREADS"] = "1"
    from fsdp_lab.forecast.forecast import Step as ForecastStep
    from fsdp_lab.forecast.forecast import forecast_step, unlike
    from fsdp_lab.training.__main__ import read_config

    def followed(blocks: int, traced: bool) -> tuple[ForecastStep, Forecast]:
        config = read_config(None, [*row.words, f"model.num_layers={blocks}"])
        step = forecast_step(config, row.workers, cuda=True, sheet=row.device, traced=traced)
        streams, capacity = STREAMS_BEFORE_129721 if row.early else STREAMS, int(row.device.memory_gib * GIB)
        return step, weigh(step.profile, config, row.workers, True, capacity, streams, row.expandable)

    try:
        few = {blocks: followed(blocks, traced=True) for blocks in DEPTHS}
        least = along_depth({blocks: memory.least_bytes for blocks, (_, memory) in few.items()}, row.blocks)
        roomy = row.reserved_gib is None and least < ROOMY * row.device.memory_gib * GIB
        memory = None if roomy else followed(row.blocks, traced=False)[1]
        differs = unlike(read_config(None, list(row.words)), row.workers, row.device)
        return Traced(row, {blocks: Step.of(step.program) for blocks, (step, _) in few.items()}, memory, differs)
    except Exception:  # noqa: BLE001 - the command ends with it
        return traceback.format_exc()
